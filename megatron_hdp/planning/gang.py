# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rings of exact sizes on any ranks, longest first: what `auto` tries where blocks do badly.

On slow links every rank beyond the smallest ring costs an exposed hop, and in a step of one or two
micro-batches a block's rounding is a large part. A ring takes the least loaded ranks and starts
when the last of them is free; that wait is in their loads from then on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.packing import first_fit, longest_first
from megatron_hdp.planning.values import Plan

Ints = NDArray[np.int64]


def plan_gang(config: PlannerConfig, request: StepRequest, limit_s: float) -> Plan:
    """Longest first; a sequence's ring is the smallest one that takes at most `limit_s`."""
    cost = config.cost()
    order = np.argsort(-np.asarray(request.lengths, np.int64), kind="stable")
    lengths = np.asarray(request.lengths, np.int64)[order]
    sizes = _sizes(lengths, config, cost, limit_s)
    seconds = cost.sequence_s(lengths, sizes)
    builder = PlanBuilder(
        np.asarray(request.ids)[order], lengths, config.num_ranks, config.capacity
    )
    loads = np.zeros(config.num_ranks)
    slots = np.zeros(config.num_ranks, np.int64)
    on_ring = np.flatnonzero(sizes > 1)
    for item in on_ring[np.argsort(-seconds[on_ring], kind="stable")].tolist():
        ranks = np.sort(np.argsort(loads, kind="stable")[: sizes[item]])
        slot = int(slots[ranks].max())
        builder.add_ring(ranks.tolist(), slot, [item])
        loads[ranks] = loads[ranks].max() + float(seconds[item]) + cost.fixed_s
        slots[ranks] = slot + 1
    local = np.flatnonzero(sizes == 1)
    weights = seconds[local] + cost.fixed_s / config.capacity * lengths[local]
    rank_of = longest_first(weights, loads)
    room = np.where(slots > 0, 0, config.capacity)
    slot_of, _ = first_fit(lengths[local], rank_of, room, slots, config.capacity)
    builder.add_locals(local, rank_of, slot_of)
    return builder.build(request.step, "auto")


def _sizes(lengths: Ints, config: PlannerConfig, cost: CostModel, limit_s: float) -> Ints:
    """The smallest ring that holds a sequence, or the smallest that is fast enough."""
    sizes = np.minimum(-(-lengths // config.capacity), config.num_ranks)
    slow = np.flatnonzero(cost.sequence_s(lengths, sizes) > limit_s)
    for item in slow.tolist():
        wider = np.arange(sizes[item], config.num_ranks + 1)
        times = cost.sequence_s(np.full(len(wider), lengths[item]), wider)
        fast = np.flatnonzero(times <= limit_s)
        sizes[item] = wider[fast[0] if len(fast) else int(times.argmin())]
    return sizes
