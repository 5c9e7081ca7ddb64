# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`plan`: what HDP would do with your lengths, before a GPU hour is spent."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megatron_hdp.cli import plan_memory, window_arguments
from megatron_hdp.cli.plan_memory import LossReport
from megatron_hdp.cli.plan_report import StepReport, report_steps
from megatron_hdp.planning import STRATEGIES, PlanError, PlannerConfig
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.distributions import draw, names

_MOST_ROWS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments in Megatron's words where it has them."""
    data = parser.add_argument_group("lengths")
    source = data.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", help="a .npy, a text file of numbers, or a corpus prefix")
    source.add_argument("--distribution", choices=names(), help="a distribution that ships")
    data.add_argument("--seq-length", type=int, help="context; default the longest sequence")
    data.add_argument("--global-batch-size", type=int, help="packs per step; default 8 capacities")
    data.add_argument("--seed", type=int, default=1234, help="of the order, and of a distribution")
    mesh = parser.add_argument_group("ranks")
    mesh.add_argument("--ranks", type=int, required=True, help="HDP domain: DP x CP")
    mesh.add_argument("--capacity", type=int, required=True, help="tokens per rank")
    mesh.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    mesh.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    mesh.add_argument(
        "--expert-parallel", type=int, default=1, help="neighbouring ranks that share experts"
    )
    mesh.add_argument("--offload", action="store_true", help="activations may go to the host")
    mesh.add_argument("--host-memory", type=float, default=200.0, help="GB per rank for offload")
    window_arguments.add_arguments(parser.add_argument_group("attention"))
    plan_memory.add_arguments(parser)
    plan = parser.add_argument_group("plan")
    plan.add_argument("--strategy", choices=[*STRATEGIES], default="auto", help="the planner")
    plan.add_argument("--compare", action="store_true", help="all strategies side by side")
    plan.add_argument("--steps", type=int, default=1, help="a row each")
    presets = ", ".join(CostModel.presets())
    plan.add_argument(
        "--profile", default="h100-estimate", help=f"a profile file or a preset: {presets}"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON instead of a table")
    out.add_argument(
        "--picture", help="FILE.html or FILE.png: static beside the plan, ranks over time"
    )


def run(args: argparse.Namespace) -> int:
    """Plans and prints; the exit code is 1 when a plan is impossible."""
    console = Console(stderr=True)
    try:
        for name in ("ranks", "capacity", "steps", "pipeline", "tensor", "vocabulary"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise PlanError(f"--{name} {getattr(args, name)}: give at least 1")
        plan_memory.check_arguments(args)
        lengths = _lengths(args)
        loss = _loss(args, lengths)
        requested = [*STRATEGIES] if args.compare else [args.strategy]
        reports = {}
        for name in requested:
            try:
                reports[name] = report_steps(_config(args, name, lengths, loss), lengths, args)
            except PlanError as error:
                if not args.compare:
                    raise
                console.print(f"{name}: {error}", style="yellow", markup=False)
        if args.picture:
            _draw(args, reports, lengths, loss, console)
    except (PlanError, OSError, ValueError) as error:
        console.print(f"megatron_hdp: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    _print(args, reports, loss)
    return 0


def _draw(
    args: argparse.Namespace,
    reports: dict[str, list[StepReport]],
    lengths: NDArray[np.int64],
    loss: LossReport | None,
    console: Console,
) -> None:
    """The first step: the strategy, or the first that could plan it, under static."""
    from megatron_hdp.observability.picture import draw as draw_picture
    from megatron_hdp.observability.timeline import of_plan

    name = args.strategy if args.strategy in reports else next(iter(reports))
    shown = {name: reports[name][0]}
    if name != "static":
        one_step = argparse.Namespace(**{**vars(args), "steps": 1})
        try:
            (static,) = report_steps(_config(args, "static", lengths, loss), lengths, one_step)
            shown = {"static": static, **shown}
        except PlanError as error:
            console.print(f"no static panel: {error}", style="yellow", markup=False)
    draw_picture(
        [of_plan(one, report.plan, report.replay, _MOST_ROWS) for one, report in shown.items()],
        args.picture,
        heading=f"{args.distribution or args.lengths} on {args.ranks} ranks, capacity "
        f"{args.capacity} tokens",
        note=_note(args, shown[name]),
        axis="time in the step, predicted",
    )


def _note(args: argparse.Namespace, report: StepReport) -> str:
    plan = report.plan
    drawn = max(1, _MOST_ROWS // args.pipeline)
    some = f"; {drawn} ranks of {args.ranks} are drawn" if drawn < args.ranks else ""
    return (
        f"first step: {len(plan.lengths):,} sequences, {plan.num_tokens:,} tokens; times predicted "
        f"by the cost model {args.profile}{some}"
    )


def _lengths(args: argparse.Namespace) -> NDArray[np.int64]:
    """All lengths of the source, at least 1, at most the context."""
    if args.distribution:
        tokens = 16 * args.steps * args.ranks * args.capacity
        longest = args.seq_length or args.ranks * args.capacity
        return draw(args.distribution, tokens, longest, args.seed)
    lengths = read_lengths(args.lengths)
    if args.seq_length:
        over = int((lengths > args.seq_length).sum())
        if over:
            raise PlanError(
                f"--seq-length {args.seq_length} is shorter than {over} of {len(lengths)} "
                f"sequences (the longest has {lengths.max()} tokens): raise it or cut them"
            )
    return lengths


def read_lengths(path: str) -> NDArray[np.int64]:
    """Lengths above 0 of a .npy, a text file of numbers, or a corpus prefix.

    Raises:
        PlanError: there is none.
    """
    if path.endswith(".npy"):
        lengths = np.load(path)
    elif os.path.isfile(path):
        lengths = np.loadtxt(path, dtype=np.int64, ndmin=1)
    else:
        lengths = _corpus(path)
    lengths = np.asarray(lengths, np.int64).ravel()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise PlanError(f"--lengths {path} holds no length above 0")
    return lengths


def _corpus(prefix: str) -> NDArray[np.int64]:
    import torch

    if not torch.cuda.is_available():
        from megatron_hdp import cpu

        cpu.install()
    from megatron_hdp.data.corpus import corpus_lengths

    return corpus_lengths(prefix).astype(np.int64)


def _loss(args: argparse.Namespace, lengths: NDArray[np.int64]) -> LossReport | None:
    if args.vocabulary is None:
        return None
    return LossReport(args, _config(args, args.strategy, lengths, None))


def _config(
    args: argparse.Namespace, strategy: str, lengths: NDArray[np.int64], loss: LossReport | None
) -> PlannerConfig:
    context = args.seq_length or int(lengths.max())
    need = -(-context // args.capacity)
    fitting = [size for size in range(1, args.ranks + 1) if args.ranks % size == 0 and size >= need]
    return PlannerConfig(
        num_ranks=args.ranks,
        capacity=args.capacity,
        strategy=strategy,
        context_parallel_size=fitting[0] if fitting else args.ranks,
        pipeline_depth=args.pipeline,
        tensor_parallel=args.tensor,
        expert_ranks=args.expert_parallel,
        cost_model=args.profile,
        loss_share=loss.share if loss and args.offload else 0.0,
        offload=args.offload,
        host_memory=args.host_memory * 1e9,
        windows=window_arguments.windows_of(args),
    )


def _print(
    args: argparse.Namespace, reports: dict[str, list[StepReport]], loss: LossReport | None
) -> None:
    if args.json:
        found: list[dict[str, Any]] = [
            {
                "strategy": name,
                "ranks": args.ranks,
                "capacity": args.capacity,
                "steps": [step.as_dict() for step in steps],
                **(loss.as_dict(steps) if loss else {}),
            }
            for name, steps in reports.items()
        ]
        print(json.dumps(found if args.compare else found[0], indent=2))
        return
    table = Table(title=f"{args.ranks} ranks, capacity {args.capacity}, {args.profile}")
    headings = ("strategy", "step (s)", "/ bound", "rings", "travelled", "bytes / static",
                "micro-batches", "peak tokens", "offloaded (GB)", "planner (ms)",
                *(["/ dense"] if args.expert_parallel > 1 else []))  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("strategy", "rings") else "right")
    for name, steps in reports.items():
        for step in steps:
            table.add_row(name, *step.as_row())
    screen = Console()
    (screen if screen.width >= 120 else Console(width=120)).print(table)
    if loss is None:
        return
    for name, steps in reports.items():
        screen.print(f"{name}: {loss.as_text(steps, args.capacity)}", highlight=False)
