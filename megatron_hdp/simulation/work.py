# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a plan's micro-batches compute, send and copy, before anything waits or shares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.experts import meetings
from megatron_hdp.planning.values import Plan
from megatron_hdp.simulation.links import Floats, Ints


@dataclass(frozen=True)
class Units:
    """What runs together: micro-batches whose ranks meet in every layer, for a ring or experts."""

    of: Ints
    """[M] the unit of every micro-batch."""
    count: int

    @classmethod
    def build(cls, plan: Plan, expert_ranks: int = 1) -> Units:
        if expert_ranks > 1:
            found, of = np.unique(meetings(plan, expert_ranks), return_inverse=True)
            return cls(of, len(found))
        of = np.full(int(plan.first_micro_batch[-1]), -1, np.int64)
        of[ring_micro_batches(plan)] = np.repeat(np.arange(plan.num_rings), plan.ring_sizes)
        alone = np.flatnonzero(of < 0)
        of[alone] = plan.num_rings + np.arange(len(alone))
        return cls(of, plan.num_rings + len(alone))

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.of, kind="stable")
        return order, np.searchsorted(self.of[order], np.arange(self.count))

    def largest(self, of_micro_batch: Floats) -> Floats:
        """[U] the largest value of a unit's micro-batches."""
        order, first = self._sorted
        return np.maximum.reduceat(of_micro_batch[order], first)


def ring_micro_batches(plan: Plan) -> Ints:
    """Micro-batch numbers of all rings' members, in ring order."""
    slots = np.repeat(plan.ring_slots, plan.ring_sizes)
    found: Ints = plan.first_micro_batch[plan.ring_ranks] + slots
    return found


@dataclass(frozen=True)
class Work:
    """Seconds and bytes of every micro-batch: whole model, forward and backward together."""

    compute_s: Floats
    """[M] arithmetic and fixed cost."""
    alone_s: Floats
    """[M] the same with the transfers that arithmetic does not hide, on links of its own."""
    hop_bytes: Floats
    """[M] sent to the next ring member, by all GPUs of an HDP rank."""
    copy_bytes: Floats
    """[M] per GPU and stage, one way to the host; as much comes back."""

    @classmethod
    def build(cls, plan: Plan, cost: CostModel, depth: int, overlap: float = 1.0) -> Work:
        """Ring steps as in megatron_hdp.planning.cost, with `overlap` of the shorter side hidden.

        Of a ring's P steps the first has nothing to wait for; each of the others takes its
        arithmetic and its transfer, the shorter one hidden behind the longer.
        """
        total = int(plan.first_micro_batch[-1])
        local = np.flatnonzero(plan.ring_of < 0)
        at = plan.first_micro_batch[plan.rank_of[local]] + plan.slot_of[local]
        compute = cost.fixed_s + np.bincount(
            at, weights=cost.local_s(plan.lengths[local]), minlength=total
        )
        alone, sent = compute.copy(), np.zeros(total)
        if plan.num_rings:
            members = ring_micro_batches(plan)
            ring_compute, ring_alone, ring_sent = _rings(plan, cost, overlap)
            compute[members] += np.repeat(ring_compute, plan.ring_sizes)
            alone[members] += np.repeat(ring_alone, plan.ring_sizes)
            sent[members] = np.repeat(ring_sent, plan.ring_sizes)
        return cls(compute, alone, sent, _copies(plan, cost, depth))


def _rings(plan: Plan, cost: CostModel, overlap: float) -> tuple[Floats, Floats, Floats]:
    """[R] (arithmetic, arithmetic and transfers, bytes sent) of one member."""
    on_ring = np.flatnonzero(plan.ring_of >= 0)
    rings, lengths = plan.ring_of[on_ring], plan.lengths[on_ring].astype(np.float64)
    members, size = plan.ring_sizes[rings], plan.ring_sizes.astype(np.float64)
    squares, all_tokens, carried = (
        np.bincount(rings, weights=each, minlength=plan.num_rings)
        for each in (cost.squares(lengths, members), lengths, cost.hop_tokens(lengths, members))
    )
    tokens, carried = all_tokens / size, carried / size
    per_gpu = cost.layers / cost.tensor_parallel
    step = per_gpu * cost.attention_s * squares / (size * size)
    linear = per_gpu * cost.token_s * tokens
    bandwidth = np.where(crosses_nodes(plan, cost), cost.across_bytes_s, cost.inside_bytes_s)
    transfer = per_gpu * cost.ring_bytes * carried / bandwidth + cost.layers * cost.latency_s
    hidden = overlap * np.minimum(step, transfer)
    return (
        linear + size * step,
        linear + step + (size - 1) * (step + transfer - hidden),
        cost.layers * cost.ring_bytes * carried * (size - 1),
    )


def crosses_nodes(plan: Plan, cost: CostModel) -> Ints:
    """[R] whether a ring leaves its node; ranks fill nodes in order."""
    node = plan.ring_ranks // cost.ranks_per_node
    first = plan.ring_offsets[:-1]
    result: Ints = np.maximum.reduceat(node, first) != np.minimum.reduceat(node, first)
    return result


def _copies(plan: Plan, cost: CostModel, depth: int) -> Floats:
    """Eq. 3 of ByteScale: a share r of all of a stage's layers but two."""
    if not len(plan.offload_ratios):
        return np.zeros(int(plan.first_micro_batch[-1]))
    layers = max(0.0, cost.layers / depth - 2)
    per_token = cost.activation_bytes / cost.tensor_parallel * layers
    moved: Floats = plan.offload_ratios * plan.micro_batch_tokens * per_token
    return moved
