# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Improves the order of a plan's slots under 1F1B, all pipelines taken as alike.

One pipeline whose slot k takes the slowest rank's time is a good stand-in for all of them
(docs/planning.md), and cheap enough to try hundreds of orders on.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.replay import micro_batch_s
from megatron_hdp.planning.values import Plan

_TRIES = 600


def pipeline_s(times: list[float], depth: int, forward_share: float) -> float:
    """Step time of one 1F1B pipeline; `times` are a stage's seconds per micro-batch."""
    count = len(times)
    forward = [[0.0] * count for _ in range(depth)]
    backward = [[0.0] * count for _ in range(depth)]

    def run_forward(stage: int, slot: int) -> None:
        if slot >= count:
            return
        before = slot - depth + stage
        if before >= 0:
            ready = backward[stage][before]
        else:
            ready = forward[stage][slot - 1] if slot else 0.0
        if stage and forward[stage - 1][slot] > ready:
            ready = forward[stage - 1][slot]
        forward[stage][slot] = ready + forward_share * times[slot]

    for stage in range(depth):
        for slot in range(depth - 1 - stage):
            run_forward(stage, slot)
    for i in range(count):
        for stage in range(depth):
            run_forward(stage, depth - 1 - stage + i)
        for stage in reversed(range(depth)):
            ahead = i + depth - 1 - stage
            ready = forward[stage][min(ahead, count - 1)]
            if i and ahead >= count:
                ready = max(ready, backward[stage][i - 1])
            if stage < depth - 1:
                ready = max(ready, backward[stage + 1][i])
            backward[stage][i] = ready + (1 - forward_share) * times[i]
    return max(stage[-1] for stage in backward)


def with_better_order(plan: Plan, cost: CostModel, depth: int) -> Plan:
    """The plan with its slots reordered by hill climbing; deterministic."""
    slots = int(plan.micro_batch_counts.max())
    seconds = micro_batch_s(plan, cost) / depth
    rank = np.repeat(np.arange(plan.num_ranks), plan.micro_batch_counts)
    slot = np.arange(len(rank)) - plan.first_micro_batch[rank]
    slowest = np.zeros(slots)
    np.maximum.at(slowest, slot, seconds)
    order = _climb(slowest.tolist(), depth, cost.forward_share)
    place = np.empty(slots, np.int64)
    place[order] = np.arange(slots)
    return _relabel(plan, place, cost.expert_ranks)


def _climb(times: list[float], depth: int, forward_share: float) -> list[int]:
    """Order of the slots: swaps and moves that do not make the pipeline slower are kept."""
    chance = random.Random(0)
    order = list(range(len(times)))
    best = pipeline_s(times, depth, forward_share)
    for _ in range(_TRIES if len(order) > 2 else 0):
        tried = order.copy()
        a, b = chance.randrange(len(order)), chance.randrange(len(order))
        if chance.random() < 0.5:
            tried[a], tried[b] = tried[b], tried[a]
        else:
            tried.insert(b, tried.pop(a))
        step_s = pipeline_s([times[slot] for slot in tried], depth, forward_share)
        if step_s <= best:
            best, order = step_s, tried
    return order


def _relabel(plan: Plan, place: np.ndarray, expert_ranks: int) -> Plan:
    """The plan with slot k moved to place[k]; a rank's list ends with its last sequence."""
    slot_of, ring_slots = place[plan.slot_of], place[plan.ring_slots]
    counts = np.ones(plan.num_ranks, np.int64)
    local = plan.ring_of < 0
    np.maximum.at(counts, plan.rank_of[local], slot_of[local] + 1)
    np.maximum.at(counts, plan.ring_ranks, np.repeat(ring_slots, plan.ring_sizes) + 1)
    counts = equal_counts(counts, expert_ranks)
    return replace(
        plan,
        slot_of=slot_of.astype(np.int32),
        ring_slots=ring_slots.astype(np.int32),
        micro_batch_counts=counts.astype(np.int32),
    )
