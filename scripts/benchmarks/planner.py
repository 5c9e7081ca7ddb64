# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How near the planners come to their lower bound, and what they cost. Nothing runs on a GPU.

Every plan is judged by event replay under one cost model: ring waits count, balanced loads are not
balanced time. Beside ours, on the same lengths: the paper's strategies, and the installed
Megatron's own BalancedCPScheduler where it survives. Seeds are not those that anything was tuned
on.

    python scripts/benchmarks/planner.py            # writes result and docs/planning.md
    python scripts/benchmarks/planner.py --quick    # a few cells, prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import planner_tables
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from megatron_hdp.planning import PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.replay import replay

SEEDS = (101, 102, 103)
REAL = ("prolong", "wlb-llm", "wikipedia")
CONTEXT = {"prolong": 2**18, "wlb-llm": 2**18, "wikipedia": 2**18, "lognormal": 2**19}
RESULT = Path(__file__).parent / "results" / "planner.json"
Row = dict[str, Any]


def cells(quick: bool) -> list[Row]:
    """Every cell of the benchmark: what is drawn, and how it is planned."""
    every = (*REAL, "github", "byted", "lognormal")
    sizes = (8, 64) if quick else (8, 12, 64, 100, 256, 1024, 4096)
    found = [_cell(d, n, c) for d in every for n in sizes for c in (8192, 16384)]
    few = (8, 64) if quick else (8, 64, 256, 1024)
    found += [_cell(d, n, 8192, capacities=k) for d in every for n in few for k in (4, 2, 1)]
    found += [_cell(d, n, 8192, slower=4.0) for d in every for n in few]
    deep = (8, 64) if quick else (8, 64, 100, 256)
    found += [_cell(d, n, c, depth=4) for d in every for n in deep for c in (16384, 8192)]
    if not quick:
        found += [_cell("prolong", n, 8192) for n in (8192, 16384)]
    return found


def _cell(
    distribution: str, ranks: int, capacity: int, *, capacities: int = 8, depth: int = 1,
    slower: float = 1.0,
) -> Row:  # fmt: skip
    return {
        "distribution": distribution, "ranks": ranks, "capacity": capacity,
        "capacities_per_rank": capacities, "pipeline": depth, "slower_across": slower,
    }  # fmt: skip


def lengths_of(cell: Row, seed: int) -> NDArray[np.int64]:
    """About `capacities_per_rank` capacities of tokens per rank."""
    room = cell["ranks"] * cell["capacity"]
    longest = min(room, CONTEXT.get(cell["distribution"], 2**21))
    return draw(cell["distribution"], cell["capacities_per_rank"] * room, longest, seed)


def config_of(cell: Row, strategy: str) -> PlannerConfig:
    """The planner's options in a cell."""
    return PlannerConfig(
        num_ranks=cell["ranks"],
        capacity=cell["capacity"],
        strategy=strategy.removesuffix(_OFFLOAD),
        offload=strategy.endswith(_OFFLOAD),
        pipeline_depth=cell["pipeline"],
        slower_across=cell["slower_across"],
    )


class Judged(NamedTuple):
    """One plan: its step over the bound, and what it cost."""

    ratio: float
    cpu_ms: float
    """CPU time of plan, values, validation and digest."""
    planning_ms: float
    """Of it, without validation and digest."""
    sequences: int


def judge(cell: Row, strategy: str, seed: int) -> Judged:
    """Plans the cell's lengths of that seed."""
    lengths = lengths_of(cell, seed)
    config = config_of(cell, strategy)
    request = StepRequest(np.arange(len(lengths)), lengths)
    begun = time.process_time()
    plan = plan_step(config, request)
    planned = time.process_time()
    plan.digest()
    digested = time.process_time()
    plan.validate(ids=request.ids, lengths=lengths, pipeline_depth=config.pipeline_depth)
    validation_s = time.process_time() - digested
    cost, depth = config.cost(), config.pipeline_depth
    generous = strategy in _PAPER  # gaps that the paper's strategies leave cost nothing
    step_s = replay(plan, cost, depth, free_gaps=generous).step_s
    bound = lower_bound(lengths, config.num_ranks, config.capacity, cost, depth)
    cpu_ms, planning_ms = 1000 * (digested - begun), 1000 * (planned - begun - validation_s)
    return Judged(step_s / bound, cpu_ms, planning_ms, len(lengths))


def measure(cell: Row, strategy: str) -> Row:
    """Worst and mean over the seeds."""
    try:
        runs = [judge(cell, strategy, seed) for seed in SEEDS]
    except PlanError as error:
        return {**cell, "strategy": strategy, "error": str(error)}
    return {
        **cell,
        "strategy": strategy,
        "sequences": runs[0].sequences,
        "ratio_worst": round(max(run.ratio for run in runs), 4),
        "ratio_mean": round(statistics.mean(run.ratio for run in runs), 4),
        "cpu_ms_median": round(statistics.median(run.cpu_ms for run in runs), 1),
        "cpu_ms_worst": round(max(run.cpu_ms for run in runs), 1),
        "planning_ms_median": round(statistics.median(run.planning_ms for run in runs), 1),
    }


class _Group:
    """What BalancedCPScheduler asks of a process group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def upstream(cell: Row, seed: int) -> Row:
    """Megatron's own planner on the same lengths, judged by the same cost model.

    It runs every sub-sample in a forward of its own, and all ranks meet between its groups.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    lengths = lengths_of(cell, seed)
    row = {**cell, "strategy": "megatron BalancedCPScheduler", "sequences": len(lengths)}
    scheduler = BalancedCPScheduler(cell["capacity"], _Group(cell["ranks"]))
    begun = time.process_time()
    try:
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}
    cpu_ms = 1000 * (time.process_time() - begun)
    config = config_of(cell, "auto")
    cost, step_s = config.cost(), 0.0
    for group in groups:
        width = Counter(sample for rank in group for sample in rank)
        loads = []
        for rank in group:
            chosen = np.array(rank, np.int64)
            sizes = np.array([width[sample] for sample in rank], np.int64)
            seconds = float(cost.sequence_s(lengths[chosen], sizes).sum()) if len(rank) else 0.0
            loads.append(seconds + cost.fixed_s * len(rank))
        step_s += max(loads)
    bound = lower_bound(lengths, config.num_ranks, config.capacity, cost, 1)
    return {**row, "ratio_worst": round(step_s / bound, 4), "cpu_ms_median": round(cpu_ms, 1)}


def rivals(quick: bool) -> list[Row]:
    """Megatron's scheduler at sizes that it can plan in minutes, one seed each."""
    from megatron_hdp import cpu

    cpu.install()
    sizes = (8,) if quick else (8, 12, 32, 64)
    return [upstream(_cell(d, n, 8192), SEEDS[0]) for d in REAL for n in sizes]


def summary(rows: list[Row]) -> list[Row]:
    """Worst ratio and cost of `auto` per group of cells, beside the best of the paper's."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "ratio_worst" in row and row["strategy"] in ("auto", *_PAPER):
            real = "real" if row["distribution"] in REAL else row["distribution"]
            key = (row["pipeline"], row["capacity"], row["capacities_per_rank"],
                   row["slower_across"], real)  # fmt: skip
            groups.setdefault(key, []).append(row)
    found = []
    for key, members in sorted(groups.items()):
        ours = [row for row in members if row["strategy"] == "auto"]
        paper: dict[int, list[float]] = {}
        for row in members:
            if row["strategy"] != "auto":
                cell = hash((row["distribution"], row["ranks"]))
                paper.setdefault(cell, []).append(row["ratio_mean"])
        worst = max(ours, key=lambda row: row["ratio_worst"])
        found.append(
            {
                "pipeline": key[0], "capacity": key[1], "capacities_per_rank": key[2],
                "slower_across": key[3], "distributions": key[4], "cells": len(ours),
                "auto_worst": worst["ratio_worst"],
                "auto_worst_at": f"{worst['distribution']} {worst['ranks']}",
                "auto_mean": round(statistics.mean(row["ratio_mean"] for row in ours), 4),
                "best_of_paper_mean": round(statistics.mean(map(min, paper.values())), 3)
                if paper else None,
            }
        )  # fmt: skip
    return found


def offload_gains(rows: list[Row]) -> list[Row]:
    """Step of `auto` with offload allowed over its step without, per group of cells."""
    plain = {_cell_key(row): row for row in rows if row["strategy"] == "auto"}
    groups: dict[tuple[Any, ...], list[tuple[float, Row]]] = {}
    for row in rows:
        if row["strategy"] == "auto" + _OFFLOAD:
            gain = row["ratio_mean"] / plain[_cell_key(row)]["ratio_mean"]
            key = row["pipeline"], row["slower_across"], row["distribution"]
            groups.setdefault(key, []).append((gain, row))
    return [
        {
            "pipeline": key[0], "slower_across": key[1], "distribution": key[2],
            "cells": len(members),
            "step_mean": round(statistics.mean(gain for gain, _ in members), 4),
            "step_best": round(min(gain for gain, _ in members), 4),
            "best_at": min(members, key=lambda one: one[0])[1]["ranks"],
            "cpu_ms_worst": max(row["cpu_ms_worst"] for _, row in members),
        }
        for key, members in sorted(groups.items())
    ]  # fmt: skip


def _cell_key(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in _cell("", 1, 1))


_PAPER = ("naive", "dp-balance", "pp-balance")
_OFFLOAD = ", offload"


def run(quick: bool) -> Row:
    """All cells; the paper's strategies up to 256 ranks at eight capacities."""
    rows: list[Row] = []
    todo = [(cell, "auto") for cell in cells(quick)]
    todo += [
        (cell, strategy)
        for cell in cells(quick)
        if cell["ranks"] <= 256 and cell["capacities_per_rank"] == 8 and cell["slower_across"] == 1
        for strategy in _PAPER
    ]
    todo += [
        (cell, "auto" + _OFFLOAD)
        for cell in cells(quick)
        if cell["ranks"] in (8, 64, 256) and cell["capacities_per_rank"] == 8
        and cell["capacity"] == 8192
    ]  # fmt: skip
    with Progress(console=Console(stderr=True)) as progress:
        for cell, strategy in progress.track(todo, description="planning"):
            rows.append(measure(cell, strategy))
    return {
        "what": "predicted step over lower bound, by event replay; nothing ran on a GPU",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}",
        "cost_model": "h100-estimate",
        "seeds": SEEDS,
        "summary": summary(rows),
        "offload": offload_gains(rows),
        "megatron": rivals(quick),
        "rows": rows,
    }


def main() -> int:
    """Runs, prints the summary, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    result = run(args.quick)
    for row in result["summary"]:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    for row in result["megatron"]:
        print(row["distribution"], row["ranks"], row.get("ratio_worst"), row.get("cpu_ms_median"),
              row.get("error", ""))  # fmt: skip
    if not args.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        planner_tables.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
