# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`doctor`: does HDP fit what is installed, and what of this machine will get in its way."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_hdp.cli.doctor_tables import show
from megatron_hdp.cli.machine.check import Check
from megatron_hdp.cli.machine.gpus import gpu_checks, judge_network, network_ports
from megatron_hdp.cli.machine.limits import host_memory, limit_checks, offload_check
from megatron_hdp.cli.machine.settings import setting_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, and what the launch line will say."""
    launch = parser.add_argument_group("launch line")
    launch.add_argument(
        "--hdp-host-memory", type=float, default=128.0, help="GiB per rank, as in training"
    )
    launch.add_argument(
        "--local-ranks", type=int, help="ranks on this host; default one per GPU, at least one"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; the exit code is 0 when HDP fits what is installed."""
    if args.hdp_host_memory <= 0 or (args.local_ranks is not None and args.local_ranks < 1):
        print("megatron_hdp: --hdp-host-memory and --local-ranks must be above 0", file=sys.stderr)
        return 2
    _make_megatron_importable()
    report = examine(args.hdp_host_memory, args.local_ranks)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["fits"] else 1


def _make_megatron_importable() -> None:
    """Without a GPU Megatron imports only with the stand-ins; doctor says so in its report."""
    import torch

    if not torch.cuda.is_available() and "megatron.core" not in sys.modules:
        from megatron_hdp import cpu

        cpu.install()


def examine(host_memory_gib: float, local_ranks: int | None) -> dict[str, Any]:
    """versions, problems, backends, patches, seams and machine, as plain values for JSON."""
    import megatron_hdp
    from megatron_hdp.patches.versions import OPTIONAL, REQUIRED, installed, version_problems
    from megatron_hdp.runtime.attention import describe_kernels

    patches, seams = _patches(), _seams()
    problems = version_problems()
    machine = _machine(host_memory_gib, local_ranks)
    fits = not problems and all(bool(entry["fits"]) for entry in [*patches, *seams])
    return {
        "megatron_hdp": megatron_hdp.__version__,
        "versions": {name: installed(name) for name in (*REQUIRED, *OPTIONAL)},
        "problems": problems,
        "backends": [dict(kernel) for kernel in describe_kernels()],
        "patches": patches,
        "seams": seams,
        "machine": [check._asdict() for check in machine],
        "fits": fits,
        "next_steps": _next_steps(problems, patches, seams, machine),
    }


def _patches() -> list[dict[str, Any]]:
    from megatron_hdp.patches import is_applied, patch_table

    return [
        {
            "target": patch.target,
            "file": _file_of(partial(_current_object, patch)),
            "expected": ", ".join(patch.parameters),
            "found": _text_of(partial(_parameters_found, patch)),
            "fits": patch.fits(),
            "applied": is_applied(patch),
            "reason": patch.reason,
            "tested": patch.tested,
        }
        for patch in patch_table()
    ]


def _seams() -> list[dict[str, Any]]:
    from megatron_hdp.patches.seams import SEAMS

    return [
        {
            "target": seam.target,
            "file": _file_of(seam.locate),
            "expected": seam.expected,
            "found": seam.found(),
            "fits": seam.found() == seam.expected,
            "applied": None,
            "use": seam.use,
        }
        for seam in SEAMS
    ]


def _machine(host_memory_gib: float, local_ranks: int | None) -> list[Check]:
    import torch

    from megatron_hdp import cpu

    gpus = 0 if cpu.is_installed() else torch.cuda.device_count()
    ports = network_ports()
    interfaces = [name for _, name in socket.if_nameindex()]
    ranks = local_ranks or max(1, gpus)
    return [
        *gpu_checks(),
        judge_network(ports),
        *setting_checks(os.environ, interfaces, has_gpu=gpus > 0),
        *limit_checks(has_network=bool(ports)),
        offload_check(host_memory_gib, ranks, host_memory()),
    ]


def _next_steps(
    problems: list[str],
    patches: list[dict[str, Any]],
    seams: list[dict[str, Any]],
    machine: list[Check],
) -> list[str]:
    """What to do, most important first."""
    from megatron_hdp.patches.registry import TESTED_MEGATRON

    steps = list(problems)
    for entry in (*patches, *seams):
        if not entry["fits"]:
            steps.append(
                f"{entry['target']} has changed: found ({entry['found']}), expected "
                f"({entry['expected']}): install megatron-core {TESTED_MEGATRON}, or see "
                f"docs/patches.md."
            )
    steps += [f"{check.name}: {check.advice}" for check in machine if check.advice]
    return steps


def _current_object(patch: Any) -> Any:
    return patch.locate()[2]


def _parameters_found(patch: Any) -> str:
    return ", ".join(patch.found())


def _file_of(locate: Callable[[], Any]) -> str:
    """file:line of what stands there, or why there is none."""
    try:
        found = inspect.unwrap(locate())
        line = inspect.getsourcelines(found)[1]
        return f"{inspect.getsourcefile(found)}:{line}"
    except (RuntimeError, ImportError, AttributeError, OSError, TypeError) as error:
        return f"unknown ({error})"


def _text_of(look: Callable[[], str]) -> str:
    try:
        return look()
    except RuntimeError as error:
        return f"missing: {error}"
