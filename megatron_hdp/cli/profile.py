# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`profile`: measures the model of a launch line on this machine, and fits the cost model to it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PASSES_ON = True
"""Arguments that it does not know are Megatron's."""
_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its own arguments; all others are a Megatron launch line's."""
    parser.usage = "%(prog)s --output FILE.json [options] MEGATRON'S ARGUMENTS OF THE MODEL"
    parser.add_argument("--output", required=True, help="the profile, for --hdp-profile")
    parser.add_argument(
        "--nproc", type=int, default=2, help="ranks with --hdp-cpu; on GPUs torchrun says it"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement; the median")
    parser.add_argument("--longest", type=int, help="tokens; default the capacity")
    parser.add_argument("--most-layers", type=int, default=2, help="to build of the model")


def run(args: argparse.Namespace) -> int:
    """Measures and writes; the exit code is 1 when it cannot."""
    console = Console(stderr=True)
    for name in ("nproc", "repeats", "longest", "most_layers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            return _refuse(console, f"{flag} {value}: give at least 1")
    folder = Path(args.output).resolve().parent
    if not folder.is_dir():
        return _refuse(console, f"--output {args.output}: there is no folder {folder}: make it")
    on_cpu, under_torchrun = "--hdp-cpu" in args.rest, "RANK" in os.environ
    if not on_cpu and not under_torchrun:
        return _refuse(
            console,
            "on GPUs start it as torchrun --standalone --nproc-per-node GPUS -m megatron_hdp "
            "profile ...; without GPUs give --hdp-cpu",
        )
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.nproc
    try:
        return _measure(args, ranks, fork=not under_torchrun)
    except (RuntimeError, ValueError) as error:
        return _refuse(console, str(error))


def _measure(args: argparse.Namespace, ranks: int, fork: bool) -> int:
    from megatron_hdp.runtime.profiling.launch_line import probe_line

    line = probe_line(args.rest, ranks, args.most_layers)
    sys.argv = ["profile", *line.argv]  # as a training script would find it

    import torch

    import megatron_hdp

    if fork:
        torch.set_num_threads(1)
    megatron_hdp.enable()
    import megatron.training.argument_utils  # noqa: F401

    from megatron_hdp.cpu.launch import run_ranks
    from megatron_hdp.runtime.profiling.measure import measure

    def body() -> dict[str, Any]:
        with _progress() as advance:
            return measure(line, args.repeats, args.longest, advance)

    measured = run_ranks(body, ranks, timeout_s=_TIMEOUT_S)[0] if fork else body()
    if int(os.environ.get("RANK", 0)) == 0:
        _write(args.output, measured, line.num_layers)
    if not fork:
        torch.distributed.destroy_process_group()
    return 0


@contextmanager
def _progress() -> Iterator[Any]:
    """What `measure` calls as it goes on; only rank 0 shows it."""
    if int(os.environ.get("RANK", 0)):
        yield lambda what, share: None
        return
    columns = TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)


def _write(path: str, measured: dict[str, Any], num_layers: int) -> None:
    from megatron_hdp.runtime.profiling.result import profile, window_warning

    found = profile(measured, num_layers)
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
    _print(found)
    if (warning := window_warning(measured, num_layers)) is not None:
        print(warning)
    print(f"wrote {path}: pass it as --hdp-profile, or to plan and simulate as --profile")


def _print(found: dict[str, Any]) -> None:
    measured, fit = found["measured"], found["measured"]["fit"]
    table = Table()
    for heading in ("tokens", "layer forward (ms)", "backward (ms)", "fit error"):
        table.add_column(heading, justify="right")
    for row, error in zip(measured["times"], fit["layer_errors"], strict=True):
        table.add_row(
            str(row["length"]), f"{1e3 * row['layer_forward_s']:.3f}",
            f"{1e3 * row['layer_backward_s']:.3f}", f"{100 * error:+.1f} %",
        )  # fmt: skip
    console = Console(width=100)
    console.print(found["source"], highlight=False)
    console.print(table)
    for name, link in measured["links"].items():
        speed, latency = link["bytes_s"] / 1e9, 1e6 * link["latency_s"]
        console.print(f"link {name}: {speed:.2f} GB/s, {latency:.0f} us a message", highlight=False)
    copies, step = measured["host_copies"], measured["step"]
    console.print(
        f"host copies: {copies['to_host'] / 1e9:.2f} GB/s out, "
        f"{copies['to_device'] / 1e9:.2f} GB/s back; gradients' end "
        f"{1e3 * step['gradient_sync_s']:.1f} ms, optimizer {1e3 * step['optimizer_s']:.1f} ms",
        highlight=False,
    )
    saved = ", ".join(f"{n} {v['measured']:.0f}" for n, v in measured["saved_bytes"].items())
    console.print(f"saved bytes per token and layer: {saved}", highlight=False)
    console.print(
        f"fit error: a layer {100 * fit['layer_worst_error']:.1f} %, micro-batches "
        f"{100 * fit['model_worst_error']:.1f} % at most", highlight=False,
    )  # fmt: skip


def _refuse(console: Console, sentence: str) -> int:
    console.print(f"megatron_hdp: {sentence}", markup=False, highlight=False, soft_wrap=True)
    return 1
