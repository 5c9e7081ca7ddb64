# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rings of exact sizes on any ranks: what `auto` tries where nested blocks do badly.

On slow links every rank beyond the smallest ring costs an exposed hop, and in a step of one or two
micro-batches a block's rounding is a large part. Rings get a time and ranks (`gang_times.py`);
here they get slots, and local sequences fill the waits before rings, then level the ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.gang_times import TimedRing, timed_rings
from megatron_hdp.planning.packing import fill_waits, first_fit, longest_first
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.values import Plan

Ints = NDArray[np.int64]

_LIMITS = (2.0, 1.0, 0.5)
"""How long, against the bound, a ring may take."""
_WORTH_FILLING = 3.0
"""A wait before a ring gets a slot of its own from this many fixed costs on."""


def best_gang(config: PlannerConfig, request: StepRequest, bound: float) -> tuple[float, Plan]:
    """(replayed step time, plan), the best of some limits on how long one ring may take."""
    cost = config.cost()
    order = np.argsort(-np.asarray(request.lengths, np.int64), kind="stable")
    lengths = np.asarray(request.lengths, np.int64)[order]
    sizes = {
        found.tobytes(): found
        for found in (ring_sizes(lengths, config, cost, limit * bound) for limit in _LIMITS)
    }
    plans = [plan_gang(config, request, order, found, bound) for found in sizes.values()]
    return min(((replay(plan, cost).step_s, plan) for plan in plans), key=lambda found: found[0])


def plan_gang(
    config: PlannerConfig, request: StepRequest, order: Ints, sizes: Ints, bound: float
) -> Plan:
    """Rings of the given sizes, and local sequences in their waits and behind them.

    Args:
        order: [S] the request's sequences in falling length; sizes: [S] in that order, 1 is local.
    """
    cost = config.cost()
    lengths = np.asarray(request.lengths, np.int64)[order]
    seconds = cost.sequence_s(lengths, sizes)
    builder = PlanBuilder(
        np.asarray(request.ids)[order], lengths, config.num_ranks, config.capacity
    )
    on_ring = np.flatnonzero(sizes > 1)
    rings = timed_rings(
        sizes[on_ring], seconds[on_ring] + cost.fixed_s, config.num_ranks, cost.ranks_per_node
    )
    ends, slots, waits = _give_slots(builder, rings, on_ring, config, cost)
    local = np.flatnonzero(sizes == 1)
    weights = seconds[local] + cost.fixed_s / config.capacity * lengths[local]
    wait_of = fill_waits(lengths[local], weights, waits, config.capacity)
    for_rest = wait_of < 0
    if not for_rest.all():
        _, ranks, wait_slots = (np.array(column) for column in zip(*waits, strict=True))
        inside = wait_of[~for_rest]
        builder.add_locals(local[~for_rest], ranks[inside], wait_slots[inside])
    rest = local[for_rest]
    rank_of = longest_first(weights[for_rest], ends)
    room = np.where(slots > 0, 0, config.capacity)
    slot_of, _ = first_fit(lengths[rest], rank_of, room, slots, config.capacity)
    builder.add_locals(rest, rank_of, slot_of)
    return replace(builder.build(request.step, "auto"), lower_bound_s=bound)


def _give_slots(
    builder: PlanBuilder,
    rings: list[TimedRing],
    items: Ints,
    config: PlannerConfig,
    cost: CostModel,
) -> tuple[FloatArray, Ints, list[tuple[float, int, int]]]:
    """Slots in the order of starts; one or more extra ones where a member waits for long.

    Returns:
        [N] end of each rank's last ring; [N] the slot behind it; (seconds, rank, slot) of what
        nothing runs in before.
    """
    full_s = float(cost.local_s(np.array([config.capacity]))[0])
    ends, following = np.zeros(config.num_ranks), np.zeros(config.num_ranks, np.int64)
    free: list[tuple[float, int, int]] = []
    for ring in rings:
        ranks = ring.ranks
        waits = np.maximum(ring.start_s - ends[ranks], 0.0)
        waits[waits < _WORTH_FILLING * cost.fixed_s] = 0.0
        extra = np.ceil(waits / full_s).astype(np.int64)
        slot = int((following[ranks] + extra).max())
        for at in np.flatnonzero(extra).tolist():
            rank, before = int(ranks[at]), int(following[ranks[at]])
            left = float(waits[at]) - (slot - before) * cost.fixed_s
            for number in range(before, slot):
                if left > 0:
                    free.append((min(left, full_s), rank, number))
                left -= full_s
        builder.add_ring(ranks.tolist(), slot, [int(items[ring.item])])
        following[ranks] = slot + 1
        ends[ranks] = ring.start_s + ring.seconds
    return ends, following, free


def ring_sizes(lengths: Ints, config: PlannerConfig, cost: CostModel, limit_s: float) -> Ints:
    """The smallest ring that holds a sequence, or the smallest that is fast enough."""
    sizes = np.minimum(-(-lengths // config.room), config.num_ranks)
    slow = np.flatnonzero(cost.sequence_s(lengths, sizes) > limit_s)
    for item in slow.tolist():
        wider = np.arange(sizes[item], config.num_ranks + 1)
        times = cost.sequence_s(np.full(len(wider), lengths[item]), wider)
        fast = np.flatnonzero(times <= limit_s)
        sizes[item] = wider[fast[0] if len(fast) else int(times.argmin())]
    return sizes
