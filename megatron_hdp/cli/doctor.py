# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`doctor`: each patch and seam, where it points, and whether it fits what is installed."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; the exit code is 0 when everything fits."""
    _make_megatron_importable()
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["fits"] else 1


def _make_megatron_importable() -> None:
    """Without a GPU Megatron imports only with the stand-ins; doctor says so in its report."""
    import torch

    if not torch.cuda.is_available() and "megatron.core" not in sys.modules:
        from megatron_hdp import cpu

        cpu.install()


def examine() -> dict[str, Any]:
    """versions, problems, backends, patches and seams, as plain values for JSON."""
    import megatron_hdp
    from megatron_hdp.patches import is_applied, patch_table
    from megatron_hdp.patches.seams import SEAMS
    from megatron_hdp.patches.versions import OPTIONAL, REQUIRED, installed, version_problems
    from megatron_hdp.runtime.attention import describe_kernels

    patches: list[dict[str, Any]] = [
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
    seams: list[dict[str, Any]] = [
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
    problems = version_problems()
    return {
        "megatron_hdp": megatron_hdp.__version__,
        "versions": {name: installed(name) for name in (*REQUIRED, *OPTIONAL)},
        "problems": problems,
        "backends": describe_kernels(),
        "patches": patches,
        "seams": seams,
        "fits": not problems and all(bool(entry["fits"]) for entry in [*patches, *seams]),
    }


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


def _print(report: dict[str, Any]) -> None:
    console = Console()
    console.print(f"megatron_hdp {report['megatron_hdp']}")
    versions = Table("package", "installed", title="versions", title_justify="left")
    for name, found in report["versions"].items():
        versions.add_row(name, found or "-")
    console.print(versions)
    for problem in report["problems"]:
        console.print(f"[red]problem[/]: {problem}")
    backends = Table(
        "backend", "usable", "version", "note", title="attention backends", title_justify="left"
    )
    for backend in report["backends"]:
        usable = "yes" if backend["usable"] else "no"
        backends.add_row(backend["name"], usable, backend["version"] or "-", backend["note"])
    console.print(backends)
    for kind in ("patches", "seams"):
        table = Table(title=kind, title_justify="left")
        for heading in ("target", "at", "fits"):
            table.add_column(heading, overflow="fold")
        for entry in report[kind]:
            fits = "yes" if entry["fits"] else f"no: found ({entry['found']})"
            table.add_row(entry["target"], entry["file"], fits)
        console.print(table)
    console.print("everything fits" if report["fits"] else "[red]something does not fit[/]")
