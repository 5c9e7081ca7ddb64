# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Doctor's report for people: tables, then what to do."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any]) -> None:
    """Prints it; a terminal narrower than the tables folds them."""
    console = Console()
    console.print(f"megatron_hdp {report['megatron_hdp']}")
    console.print(_versions(report["versions"]))
    console.print(_backends(report["backends"]))
    for kind in ("patches", "seams"):
        console.print(_fit(kind, report[kind]))
    console.print(_machine(report["machine"]))
    for number, step in enumerate(report["next_steps"], start=1):
        console.print(f"{number}. {step}", markup=False, highlight=False, soft_wrap=True)
    console.print("HDP fits" if report["fits"] else "[red]HDP does not fit what is installed[/]")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _versions(versions: dict[str, str | None]) -> Table:
    table = _table("versions", "package", "installed")
    for name, found in versions.items():
        table.add_row(name, found or "-")
    return table


def _backends(backends: list[dict[str, Any]]) -> Table:
    table = _table("attention backends", "backend", "usable", "version", "note")
    for backend in backends:
        usable = "yes" if backend["usable"] else "no"
        table.add_row(backend["name"], usable, backend["version"] or "-", backend["note"])
    return table


def _fit(kind: str, entries: list[dict[str, Any]]) -> Table:
    table = _table(kind, "target", "at", "fits")
    for entry in entries:
        fits = "yes" if entry["fits"] else f"no: found ({entry['found']})"
        table.add_row(entry["target"], entry["file"], fits)
    return table


def _machine(checks: list[dict[str, str]]) -> Table:
    table = _table("this machine", "what", "found", "advice")
    for check in checks:
        table.add_row(check["name"], check["found"], check["advice"] or "-")
    return table
