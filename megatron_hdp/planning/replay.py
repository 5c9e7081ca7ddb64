# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Event replay of a plan: when every micro-batch really starts and ends, ring waits included.

Balanced loads are not balanced time: a ring starts when its slowest member arrives, and its members
stay together to the end of the micro-batch. Ranks that share experts do so in every slot
(`experts.py`). The schedule is Megatron's: forward then backward
without pipeline stages, 1F1B with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.experts import meetings
from megatron_hdp.planning.head_parallel import ring_seconds
from megatron_hdp.planning.values import Plan


@dataclass(frozen=True)
class Replay:
    """Times of a step, in seconds from its start."""

    step_s: float
    busy_s: FloatArray
    """[N] time in micro-batches of every rank's first stage, waits for ring members included."""
    forward: tuple[FloatArray, FloatArray]
    """(start, end), each [p, N, K]; NaN past a rank's last slot."""
    backward: tuple[FloatArray, FloatArray]

    @property
    def waited_s(self) -> FloatArray:
        """[N] step time minus busy time."""
        return self.step_s - self.busy_s


def micro_batch_s(plan: Plan, cost: CostModel, *, free_gaps: bool = False) -> FloatArray:
    """[M] seconds of every micro-batch, whole model, waits left out.

    Args:
        free_gaps: zero-loss micro-batches cost nothing, which favours strategies that leave gaps.
    """
    total = int(plan.first_micro_batch[-1])
    local = np.flatnonzero(plan.ring_of < 0)
    at = plan.first_micro_batch[plan.rank_of[local]] + plan.slot_of[local]
    seconds = cost.fixed_s + np.bincount(
        at, weights=cost.local_s(plan.lengths[local]), minlength=total
    )
    if plan.num_rings:
        ring = ring_seconds(plan, cost, plan.head_degrees)
        members = np.repeat(np.arange(plan.num_rings), plan.ring_sizes)
        where = plan.first_micro_batch[plan.ring_ranks] + plan.ring_slots[members]
        seconds[where] += ring[members]
    if free_gaps:
        seconds[plan.micro_batch_tokens == 0] = 0.0
    return seconds


def replay(
    plan: Plan, cost: CostModel, pipeline_depth: int = 1, *, free_gaps: bool = False
) -> Replay:
    """Replays one step of `plan` under 1F1B with `pipeline_depth` stages (1: none)."""
    return _Replay(plan, cost, pipeline_depth, free_gaps).run()


class _Replay:
    """Vectorised over ranks: slot by slot, stage by stage, in an order that 1F1B allows.

    Stage j warms up with w_j = p-1-j forwards; then F(j, w_j+i) is followed by B(j, i). So
    F(j, k) waits for F(j-1, k) and B(j, k-w_j-1), and B(j, i) for B(j+1, i) and F(j, w_j+i) or,
    past the last forward, B(j, i-1).
    """

    def __init__(self, plan: Plan, cost: CostModel, depth: int, free_gaps: bool) -> None:
        self.depth = depth
        self.counts = plan.micro_batch_counts.astype(np.int64)
        self.slots = int(self.counts.max())
        seconds = micro_batch_s(plan, cost, free_gaps=free_gaps) / depth
        self.time = np.zeros((plan.num_ranks, self.slots))
        rank = np.repeat(np.arange(plan.num_ranks), self.counts)
        slot = np.arange(len(rank)) - plan.first_micro_batch[rank]
        self.time[rank, slot] = seconds
        self.there = np.arange(self.slots)[None] < self.counts[:, None]
        self.share = cost.forward_share
        self._rings = (
            self._rings_by_slot(plan)
            if cost.expert_ranks == 1
            else self._meetings_by_slot(plan, cost.expert_ranks)
        )
        for number in range(self.slots):
            # Members meet in every layer, so local sequences behind a ring hold up all of them.
            self._together(self.time[:, number], number)
        shape = (depth, plan.num_ranks, self.slots)
        self.f0, self.f1 = np.zeros(shape), np.zeros(shape)
        self.b0, self.b1 = np.zeros(shape), np.zeros(shape)

    def _rings_by_slot(self, plan: Plan) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Per slot: (members of its rings, offsets of the rings in them)."""
        order = np.argsort(plan.ring_slots, kind="stable")
        bounds = np.searchsorted(plan.ring_slots[order], np.arange(self.slots + 1))
        found = []
        for slot in range(self.slots):
            rings = order[bounds[slot] : bounds[slot + 1]]
            sizes = plan.ring_sizes[rings]
            first = np.cumsum(sizes) - sizes
            at = np.arange(int(sizes.sum())) + np.repeat(plan.ring_offsets[rings] - first, sizes)
            found.append((plan.ring_ranks[at].astype(np.int64), first))
        return found

    def _meetings_by_slot(
        self, plan: Plan, expert_ranks: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The same for ranks that share experts, joined by rings."""
        number = np.zeros((plan.num_ranks, self.slots), np.int64)
        number[self.there] = meetings(plan, expert_ranks)
        found = []
        for slot in range(self.slots):
            ranks = np.flatnonzero(self.there[:, slot])
            order = ranks[np.argsort(number[ranks, slot], kind="stable")]
            _, first = np.unique(number[order, slot], return_index=True)
            found.append((order, first))
        return found

    def _together(self, ready: FloatArray, slot: int) -> FloatArray:
        """Gives ranks that meet in a slot their largest value, in place."""
        members, first = self._rings[slot]
        if len(members):
            sizes = np.diff(np.append(first, len(members)))
            ready[members] = np.repeat(np.maximum.reduceat(ready[members], first), sizes)
        return ready

    def _forward(self, stage: int, slot: int) -> None:
        if slot >= self.slots:
            return
        before = slot - (self.depth - 1 - stage) - 1
        if before >= 0:
            ready = self.b1[stage, :, before].copy()
        elif slot > 0:
            ready = self.f1[stage, :, slot - 1].copy()
        else:
            ready = np.zeros(len(self.counts))
        if stage > 0:
            ready = np.maximum(ready, self.f1[stage - 1, :, slot])
        start = self._together(ready, slot)
        self.f0[stage, :, slot] = start
        self.f1[stage, :, slot] = start + self.share * self.time[:, slot]

    def _backward(self, stage: int, slot: int) -> None:
        ahead = slot + self.depth - 1 - stage
        last = np.minimum(ahead, self.counts - 1)
        ready = self.f1[stage, np.arange(len(self.counts)), last]
        if slot > 0:
            past = ahead >= self.counts
            ready = np.where(past, np.maximum(ready, self.b1[stage, :, slot - 1]), ready)
        if stage < self.depth - 1:
            ready = np.maximum(ready, self.b1[stage + 1, :, slot])
        start = self._together(ready, slot)
        self.b0[stage, :, slot] = start
        self.b1[stage, :, slot] = start + (1 - self.share) * self.time[:, slot]

    def run(self) -> Replay:
        for stage in range(self.depth):
            for slot in range(self.depth - 1 - stage):
                self._forward(stage, slot)
        for i in range(self.slots):
            for stage in range(self.depth):
                self._forward(stage, self.depth - 1 - stage + i)
            for stage in reversed(range(self.depth)):
                self._backward(stage, i)
        gone = np.broadcast_to(~self.there, self.f0.shape)
        ends = np.where(gone, 0.0, self.b1)
        for times in (self.f0, self.f1, self.b0, self.b1):
            times[gone] = np.nan
        return Replay(
            float(ends.max()),
            np.where(self.there, self.time, 0.0).sum(1),
            (self.f0, self.f1),
            (self.b0, self.b1),
        )
