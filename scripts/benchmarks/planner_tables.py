# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/planning.md from results/planner.json; a test compares the two.

python scripts/benchmarks/planner_tables.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "scripts" / "benchmarks" / "results" / "planner.json"
PAGE = ROOT / "docs" / "planning.md"
BEGIN = "<!-- Written by scripts/benchmarks/planner_tables.py from results/planner.json. -->\n"
END = "<!-- End of the tables. -->\n"
COSTS_OF = ("prolong", "wikipedia")
SMALLEST = 64
Row = dict[str, Any]


def page(text: str) -> str:
    """The page with today's tables between its two marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "".join(tables(json.loads(RESULT.read_text()))) + END + after


def tables(result: Row) -> Iterator[str]:
    """How near to the bound, the rival on the same lengths, CPU times."""
    yield f"\nMeasured {result['date']}, {result['machine']}, seeds {result['seeds']}.\n\n"
    heads: tuple[str, ...] = (
        "stages", "capacity", "capacities of tokens per rank", "links", "distributions", "cells",
        "worst", "mean", "best of the paper's, mean",
    )  # fmt: skip
    yield from _table(heads, map(_ratios, sorted(result["summary"], key=_order)))
    yield (
        "\nOn the same lengths, judged by the same cost model (one seed; it runs every sub-sample "
        "alone, and all\nranks meet between its groups):\n\n"
    )
    heads = ("lengths", "ranks", "Megatron's BalancedCPScheduler, step over bound", "its CPU ms")
    yield from _table(heads, map(_rival, result["megatron"]))
    yield (
        "\nStep of `auto` with `--offload` over its step without, 8K, 8 capacities of tokens per "
        "rank, 8, 64 and\n256 ranks (copies at the cost model's rate, 200 GB of host memory a "
        "rank):\n\n"
    )
    heads = ("stages", "links", "lengths", "mean", "best", "CPU ms, worst")
    yield from _table(heads, map(_offload, result["offload"]))
    yield "\n"
    heads = ("ranks", "sequences", "CPU ms, plan with values, validation and digest",
             "of it planning")  # fmt: skip
    yield from _table(heads, map(_cpu, filter(_shows_cost, result["rows"])))
    yield "\n"


def _table(heads: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |\n"


def _order(row: Row) -> tuple[Any, ...]:
    return row["pipeline"], row["slower_across"], row["capacity"], -row["capacities_per_rank"]


def _ratios(row: Row) -> tuple[Any, ...]:
    paper = row["best_of_paper_mean"]
    return (
        row["pipeline"], f"{row['capacity'] // 1024}K", row["capacities_per_rank"],
        _links(row), row["distributions"], row["cells"],
        f"{row['auto_worst']:.3f} ({row['auto_worst_at']})", f"{row['auto_mean']:.3f}",
        "" if paper is None else f"{paper:.3f}",
    )  # fmt: skip


def _rival(row: Row) -> tuple[Any, ...]:
    shown = row.get("error") or f"{row['ratio_worst']:.3f}"
    return row["distribution"], row["ranks"], shown, row.get("cpu_ms_median", "")


def _offload(row: Row) -> tuple[Any, ...]:
    return (
        row["pipeline"], _links(row), row["distribution"], f"{row['step_mean']:.3f}",
        f"{row['step_best']:.3f} ({row['best_at']} ranks)", f"{row['cpu_ms_worst']:.0f}",
    )  # fmt: skip


def _links(row: Row) -> str:
    slower = row["slower_across"]
    return "" if slower == 1 else f"{slower:.0f}x slower"


def _shows_cost(row: Row) -> bool:
    """`auto` at eight capacities on normal links, where batches are large."""
    return (
        row["strategy"] == "auto" and row["distribution"] in COSTS_OF
        and row["ranks"] >= SMALLEST and row["ranks"] != 100
        and row["capacities_per_rank"] == 8 and row["slower_across"] == 1
    )  # fmt: skip


def _cpu(row: Row) -> tuple[Any, ...]:
    stages = f", {row['pipeline']} stages" if row["pipeline"] > 1 else ""
    return (
        f"{row['ranks']:,} ({row['distribution']}, {row['capacity'] // 1024}K{stages})",
        f"{row['sequences']:,}",
        f"{row['cpu_ms_median']:.1f} (worst of three {row['cpu_ms_worst']:.1f})",
        f"{row['planning_ms_median']:.1f}",
    )


def write() -> None:
    """Rewrites the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    write()
