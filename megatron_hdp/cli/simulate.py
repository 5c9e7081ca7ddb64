# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`simulate`: what HDP would give a model on a cluster, for your lengths. Nothing runs on a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_hdp.cli import window_arguments
from megatron_hdp.cli.plan import read_lengths
from megatron_hdp.planning import STRATEGIES, PlanError
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.distributions import names
from megatron_hdp.simulation import Cluster, ModelShape
from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.cluster import presets
from megatron_hdp.simulation.experiment import (
    Run,
    Setting,
    ablation,
    ablation_strategies,
    make_setting,
    run_strategy,
)

_MOST_ROWS = 64
_UNITS = {"K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    """8192, 8K or 2M."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = int(text[:-1] if unit > 1 else text) * unit
    if number < 1:
        raise ValueError
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments in Megatron's words where it has them."""
    job = parser.add_argument_group("model and lengths")
    shapes = ", ".join(presets("models"))
    job.add_argument("--model", required=True, help=f"a JSON file, or one of {shapes}")
    source = job.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", choices=names(), help="a distribution that ships")
    source.add_argument("--lengths", help="a .npy, a text file of numbers, or a corpus prefix")
    job.add_argument("--context", type=tokens, required=True, help="for example 2M")
    job.add_argument("--tokens", type=tokens, default=2**25, help="per step; default 32M")
    job.add_argument("--steps", type=int, default=3, help="averaged over; default 3")
    job.add_argument("--seed", type=int, default=0, help="of the drawn sequences")
    window_arguments.add_arguments(job)
    mesh = parser.add_argument_group("cluster")
    mesh.add_argument("--gpus", type=int, required=True, help="DP x CP x TP x PP")
    mesh.add_argument("--tensor", type=int, help="tensor-parallel size; default the model's")
    mesh.add_argument(
        "--expert-parallel", type=int, help="neighbours that share experts; default the model's"
    )
    mesh.add_argument("--pipeline", type=int, help="pipeline stages; default the model's")
    mesh.add_argument("--capacity", type=tokens, default=8192, help="tokens per rank; default 8K")
    clusters = ", ".join(presets("clusters"))
    mesh.add_argument(
        "--cluster", default="bytescale-inferred", help=f"a JSON file, or one of {clusters}"
    )
    mesh.add_argument(
        "--profile", help="times per layer from a cost model; links stay the cluster's"
    )
    out = parser.add_argument_group("output")
    strategies = ["all", *STRATEGIES]
    out.add_argument("--strategy", choices=strategies, default="all", help="the planner")
    out.add_argument("--json", action="store_true", help="print JSON instead of a table")
    out.add_argument("--trace", help="FILE.json: first step of every strategy, for Perfetto")
    out.add_argument("--picture", help="FILE.html or .png: static above the best, first step")


def run(args: argparse.Namespace) -> int:
    """Simulates and prints; the exit code is 1 when it cannot."""
    console = Console(stderr=True)
    try:
        setting = setting_of(args)
        source = args.data or read_lengths(args.lengths)
        packs = args.tokens // args.context
        if packs < 1 or args.steps < 1:
            raise PlanError(
                f"--tokens {args.tokens} holds no pack of --context {args.context}: raise it, and "
                f"give --steps of at least 1"
            )
        requests = draw_steps(source, args.context, packs, args.steps, args.seed)
        runs: dict[str, Run] = {}
        for name in track(_strategies(args, setting), "simulating", console=console):
            try:
                runs[name] = run_strategy(setting, name, requests)
            except PlanError as error:
                if args.strategy != "all":
                    raise
                console.print(f"{name}: {error}", style="yellow", markup=False)
        _write_pictures(args, runs)
        report = _report(args, setting, runs)
    except (PlanError, OSError, ValueError) as error:
        console.print(f"megatron_hdp: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


def setting_of(args: argparse.Namespace) -> Setting:
    """The model on the cluster, cut as asked.

    Raises:
        PlanError: an unknown model or cluster, or GPUs that cannot be cut so.
    """
    model, cluster = ModelShape.load(args.model), Cluster.load(args.cluster)
    tensor = args.tensor or model.tensor_parallel
    experts = args.expert_parallel or model.expert_parallel
    cost = model.cost_model(cluster, tensor, experts)
    if args.profile:
        cost = replace(CostModel.load(args.profile), tensor_parallel=tensor)
        cost = cost.with_experts(experts, model.exchange_bytes) if experts > 1 else cost
    return make_setting(
        cost.with_windows(window_arguments.windows_of(args)),
        cluster,
        gpus=args.gpus,
        pipeline_depth=args.pipeline or model.pipeline_parallel,
        context=args.context,
        capacity=args.capacity,
        parameters=model.parameters,
        boundary_bytes=2.0 * model.hidden,
    )


def _strategies(args: argparse.Namespace, setting: Setting) -> list[str]:
    if args.strategy != "all":
        return [args.strategy]
    both = ["dp-balance"] if setting.pipeline_depth == 1 else ["dp-balance", "pp-balance"]
    return list(dict.fromkeys(["static", *both, *ablation_strategies(setting).values()]))


def _report(args: argparse.Namespace, setting: Setting, runs: dict[str, Run]) -> dict[str, Any]:
    found = {name: run.as_dict() for name, run in runs.items()}
    if "static" in runs:
        for values in found.values():
            values["speedup"] = found["static"]["step_s"] / values["step_s"]
    return {
        "what": "simulated; nothing ran on a GPU",
        "model": args.model,
        "gpus": args.gpus,
        "hdp_ranks": setting.num_ranks,
        "tensor_parallel": setting.cost.tensor_parallel,
        "expert_ranks": setting.cost.expert_ranks,
        "pipeline_parallel": setting.pipeline_depth,
        "context": args.context,
        "capacity": args.capacity,
        "static_context_parallel": setting.static_context_parallel,
        "data": args.data or args.lengths,
        "steps": args.steps,
        "windows": asdict(setting.cost.windows),
        "cluster": {"name": setting.cluster.name, "source": setting.cluster.source},
        "ablation": ablation(setting, runs) if "static" in runs else {},
        "strategies": found,
    }


def _write_pictures(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    if not (args.trace or args.picture):
        return
    from megatron_hdp.observability.perfetto import write_chrome
    from megatron_hdp.observability.picture import draw
    from megatron_hdp.observability.timeline import of_plan

    timelines = {
        name: of_plan(f"{name} (simulated)", run.plans[0], run.simulations[0], _MOST_ROWS)
        for name, run in runs.items()
    }
    if args.trace:
        write_chrome(timelines.values(), args.trace)
    if args.picture:
        best = min(runs, key=lambda name: runs[name].step_s)
        shown = dict.fromkeys(name for name in ("static", best) if name in runs)
        draw(
            [timelines[name] for name in shown],
            args.picture,
            heading=f"{args.model} on {args.gpus} GPUs, context {args.context} tokens, first step",
            note=f"{args.data or args.lengths}; cluster {args.cluster}, simulated; "
            "at the end gradients are synchronised",
            axis="time in the step, simulated",
        )


def _print(report: dict[str, Any]) -> None:
    screen = Console()
    console = screen if screen.width >= 120 else Console(width=120)
    console.print(
        f"{report['model']} on {report['gpus']} GPUs ({report['cluster']['name']}): "
        f"{report['hdp_ranks']} HDP ranks x TP {report['tensor_parallel']} x PP "
        f"{report['pipeline_parallel']}, static CP {report['static_context_parallel']}; simulated"
    )
    table = Table()
    for heading in ("strategy", "step (s)", "speedup", "computing", "exposed", "ring waits",
                    "PP bubble", "DP bubble", "ring TB", "planner (ms)"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, values in report["strategies"].items():
        shares = values["shares"]
        parts = ("compute", "exposed", "ring_wait", "pipeline_bubble", "data_bubble")
        table.add_row(
            name, f"{values['step_s']:.1f}", f"{values.get('speedup', 1.0):.2f}",
            *(f"{100 * abs(shares[part]):.0f} %" for part in parts),
            f"{values['ring_bytes'] / 1e12:.1f}", f"{values['planner_cpu_ms']:.0f}",
        )  # fmt: skip
    console.print(table)
    if report["ablation"]:
        steps = ", ".join(f"+{key} {value:.2f}" for key, value in report["ablation"].items())
        console.print(f"over static with a blocking loader: {steps}")
