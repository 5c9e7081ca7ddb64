# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rivals under the same simulator, lengths and cluster; a planner that blocks pays for its time.

* Megatron's own BalancedCPScheduler, from the installed wheel: every sub-sample is a forward of its
  own, all ranks meet between its groups, and it runs inside the data iterator of the step.
* A static mesh whose packs hold sequences of similar length.
* Longest first: minimal rings, each item to the least loaded ranks by predicted time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from common import CAPACITY, setting, write
from rich.progress import track

from megatron_hdp import cpu
from megatron_hdp.planning import Plan, PlannerConfig, StepRequest
from megatron_hdp.planning.listing import Listing
from megatron_hdp.planning.naive import minimal_degree
from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import Setting, run_strategy
from megatron_hdp.simulation.step import simulate

CONTEXT = 2**18
OURS = ("static", "naive", "dp-balance", "auto")
Row = dict[str, Any]


class _Group:
    """What BalancedCPScheduler asks of a process group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def megatron(place: Setting, request: StepRequest) -> tuple[float, float]:
    """(simulated seconds, planner's CPU seconds) of Megatron's scheduler.

    Raises:
        Exception: whatever it fails with.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(place.capacity, _Group(place.num_ranks))
    begun = time.process_time()
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(request.lengths.tolist())), None)
    spent = time.process_time() - begun
    found = [simulate(_group_plan(place, request, group), replace(place.job, parameters=0.0),
                      place.cluster) for group in groups]  # fmt: skip
    whole = simulate(_group_plan(place, request, groups[0]), place.job, place.cluster)
    return sum(one.step_s for one in found) + whole.sync_s, spent


def _group_plan(place: Setting, request: StepRequest, group: list[list[int]]) -> Plan:
    """One of its groups: rank -> sub-samples; who appears on several ranks is a ring of them."""
    members: dict[int, list[int]] = {}
    for rank, samples in enumerate(group):
        for sample in samples:
            members.setdefault(sample, []).append(rank)
    chosen = sorted(members)
    lengths = np.asarray(request.lengths)[chosen]
    config = place.planner("naive", request)
    listing = Listing(config, StepRequest(np.arange(len(chosen)), lengths))
    for position in np.argsort(-lengths, kind="stable").tolist():
        ranks = members[chosen[position]]
        listing.add_ring(ranks, np.array([position]))
    plan = listing.build("megatron")
    plan.validate(lengths=lengths)
    return plan


def by_length(request: StepRequest, context: int) -> StepRequest:
    """The same sequences in packs of similar length: sorted, cut where a pack is full."""
    lengths = np.asarray(request.lengths)
    order = np.argsort(-lengths, kind="stable")
    offsets, held = [0], 0
    for at, length in enumerate(lengths[order].tolist()):
        if held + length > context:
            offsets.append(at)
            held = 0
        held += length
    offsets.append(len(order))
    return StepRequest(
        np.asarray(request.ids)[order], lengths[order], np.array(offsets), request.step
    )


def longest_first(config: PlannerConfig, request: StepRequest) -> Plan:
    """Longest processing time first, on predicted seconds; short sequences fill up packs."""
    lengths, cost = np.asarray(request.lengths, np.int64), config.cost()
    listing, loads = Listing(config, request), np.zeros(config.num_ranks)
    open_packs: list[list[int]] = [[] for _ in range(config.num_ranks)]
    room = np.zeros(config.num_ranks, np.int64)
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        width = minimal_degree(length, config.capacity)
        ranks = np.argsort(loads, kind="stable")[:width]
        seconds = float(cost.sequence_s(np.array([length]), np.array([width]))[0])
        loads[ranks] = loads[ranks].max() + seconds + cost.fixed_s * (width > 1)
        if width > 1:
            listing.add_ring(ranks.tolist(), np.array([sequence]))
            continue
        rank = int(ranks[0])
        if length > room[rank]:
            if open_packs[rank]:
                listing.add_pack(rank, np.array(open_packs[rank]))
            open_packs[rank], room[rank] = [], config.capacity
            loads[rank] += cost.fixed_s
        open_packs[rank].append(sequence)
        room[rank] -= length
    for rank, pack in enumerate(open_packs):
        if pack:
            listing.add_pack(rank, np.array(pack))
    plan = listing.build("longest first")
    plan.validate(ids=request.ids, lengths=request.lengths)
    return plan


def cell(data: str, gpus: int, steps: int) -> list[Row]:
    """Every planner on the same steps; seconds are means, the planner's time apart."""
    place = setting("llama-7b", CONTEXT, gpus)
    packs = 8 * place.num_ranks * CAPACITY // CONTEXT
    requests = draw_steps(data, CONTEXT, packs, steps, 1)
    found: dict[str, tuple[float, float, bool]] = {}
    for strategy in OURS:
        run = run_strategy(place, strategy, requests)
        found[strategy] = run.step_s, run.planner_s, False
    run = run_strategy(place, "static", [by_length(request, CONTEXT) for request in requests])
    found["static, packs by length"] = run.step_s, run.planner_s, True
    seconds, spent = [], 0.0
    for request in requests:
        begun = time.process_time()
        plan = longest_first(place.planner("naive", request), request)
        spent += time.process_time() - begun
        seconds.append(simulate(plan, place.job, place.cluster).step_s)
    found["longest first"] = float(np.mean(seconds)), spent / steps, True
    rows, error = [], ""
    try:
        each = [megatron(place, request) for request in requests]
        found["Megatron BalancedCPScheduler"] = (
            float(np.mean([s for s, _ in each])), float(np.mean([s for _, s in each])), True,
        )  # fmt: skip
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    auto = found["auto"][0]
    for name, (step_s, planner_s, blocks) in found.items():
        whole = step_s + planner_s * blocks
        rows.append({
            "data": data, "gpus": gpus, "hdp_ranks": place.num_ranks, "planner": name,
            "step_s": round(step_s, 3), "planner_s": round(planner_s, 3), "blocks": blocks,
            "with_planner_s": round(whole, 3), "over_auto": round(whole / auto, 3),
        })  # fmt: skip
    if error:
        rows.append({"data": data, "gpus": gpus, "planner": "Megatron BalancedCPScheduler",
                     "error": error})  # fmt: skip
    return rows


def main() -> None:
    """Three data sets on two sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    cpu.install()
    cells = [(d, g) for g in (128, 512) for d in ("prolong", "github", "byted")]
    rows: list[Row] = []
    for data, gpus in track(cells, "rivals"):
        rows += cell(data, gpus, steps)
    count = Counter(row["planner"] for row in rows if row.get("over_auto", 1.0) < 1.0)
    write("rivals", {"context": CONTEXT, "steps": steps, "faster_than_auto": dict(count),
                     "rows": rows})  # fmt: skip


if __name__ == "__main__":
    main()
