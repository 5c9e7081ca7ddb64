# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which rings split heads: an all-to-all over u of P members, and a ring of P/u (Ulysses x ring).

An all-to-all before and after attention turns the shards of u neighbours into one shard of u times
the tokens, with a u-th of the heads. It stands before and after the computing, where a ring's hops
run beside it: fewer bytes are not less time. Source: Jacobs et al., arXiv 2309.14509; Fang and
Zhao, arXiv 2405.07719.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.values import Plan

if TYPE_CHECKING:
    from megatron_hdp.planning.config import PlannerConfig

Ints = NDArray[np.int64]

_SUM_BYTES = 4
"""dK and dV travel round a ring as sums in float32, or in the inputs' wider type."""


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one TP rank, and what their transfers weigh."""

    heads: int
    """H, of queries."""
    groups: int
    """G, of keys and values."""
    head_dim: int
    value_bytes: int = 2
    recomputed: float = 0.0
    """Share of layers whose attention runs forward again in backward, and so its transfers."""

    def degrees(self) -> tuple[int, ...]:
        """Numbers above 1 of members that heads can be split over: they divide H and G."""
        return tuple(
            u for u in range(2, self.groups + 1) if not self.groups % u and not self.heads % u
        )

    @property
    def hop_bytes(self) -> float:
        """Per token and hop of a ring: K, V in both passes, and dK, dV; nothing of recompute, as
        its computing is not in the cost model either."""
        sums = max(_SUM_BYTES, self.value_bytes)
        return float(self.groups * self.head_dim * (4 * self.value_bytes + 2 * sums))

    @property
    def passes(self) -> float:
        """Times that a layer exchanges heads: forward, backward, and forward again."""
        return 2.0 + self.recomputed

    @property
    def moved_bytes(self) -> float:
        """Per token of q, k, v, out in each forward pass, and of their gradients."""
        return 2 * self.passes * self.value_bytes * (self.heads + self.groups) * self.head_dim

    def sent_bytes(self, size: Ints | int, degree: Ints | int) -> FloatArray:
        """Bytes that a ring's member sends per token of its shard and layer, all passes.

        A hop of the shorter ring moves u times the tokens with a u-th of the heads.

        Args:
            size: members P; degree: u, a divisor of P; 1: heads stay whole.
        """
        p, u = np.asarray(size, np.float64), np.asarray(degree, np.float64)
        again = 2 * self.recomputed * self.value_bytes * self.groups * self.head_dim
        hop = self.hop_bytes + again
        result: FloatArray = self.moved_bytes * (u - 1) / u + (p / u - 1) * hop
        return result


def with_head_degrees(plan: Plan, config: PlannerConfig) -> Plan:
    """The plan with heads split in each ring where that sends less and is not slower.

    Of several degrees the fastest, of equally fast ones the one that sends least. No micro-batch is
    predicted to take longer than without, so no step is. `lower_bound_s` is of whole heads: a plan
    that splits some has none.
    """
    shape = config.heads
    if shape is None or not plan.num_rings:
        return plan
    cost, sizes = config.cost(), plan.ring_sizes
    degrees = np.ones(plan.num_rings, np.int64)
    seconds, sent = ring_seconds(plan, cost, degrees), shape.sent_bytes(sizes, 1)
    whole = sent
    for degree in shape.degrees():
        tried = np.where(sizes % degree == 0, degree, 1)
        its_seconds, its_sent = ring_seconds(plan, cost, tried), shape.sent_bytes(sizes, tried)
        faster = (its_seconds < seconds) | ((its_seconds == seconds) & (its_sent < sent))
        better = (tried > 1) & (its_sent < whole) & faster
        degrees[better] = degree
        seconds, sent = np.where(better, its_seconds, seconds), np.where(better, its_sent, sent)
    if degrees.max() == 1:
        return plan
    return replace(plan, head_degrees=degrees.astype(np.int32), lower_bound_s=0.0)


def ring_seconds(plan: Plan, cost: CostModel, degrees: NDArray[np.integer]) -> FloatArray:
    """[R] seconds on every member of each ring, without a micro-batch's fixed part.

    Args:
        degrees: [R] members that heads are split over, divisors of the rings' sizes; empty: none
            are.
    """
    on_ring = np.flatnonzero(plan.ring_of >= 0)
    rings, lengths = plan.ring_of[on_ring], plan.lengths[on_ring].astype(np.float64)
    sizes = plan.ring_sizes
    size = sizes[rings]
    squares, tokens, carried = (
        np.bincount(rings, weights=each, minlength=plan.num_rings)
        for each in (cost.squares(lengths, size), lengths, cost.hop_tokens(lengths, size))
    )
    hop = cost.hop_s(_span(plan, cost, sizes))
    if not len(degrees):
        return cost.ring_s(squares, tokens, carried, sizes, hop)
    inside = cost.hop_s(_span(plan, cost, np.asarray(degrees, np.int64)))
    ring = cost.ring_s(squares, tokens, carried, sizes, hop, degrees)
    return ring + cost.head_exchange_s(tokens / sizes, degrees, inside)


def _span(plan: Plan, cost: CostModel, part: Ints) -> Ints:
    """[R] 1 where each run of `part` members of a ring stays in one node, else more than a node."""
    runs = plan.ring_sizes // part
    ring = np.repeat(np.arange(plan.num_rings), runs)
    first = np.cumsum(runs) - runs
    starts = plan.ring_offsets[ring] + (np.arange(len(ring)) - first[ring]) * part[ring]
    node = plan.ring_ranks // cost.ranks_per_node
    crosses = np.maximum.reduceat(node, starts) != np.minimum.reduceat(node, starts)
    return np.where(np.logical_or.reduceat(crosses, first), cost.ranks_per_node + 1, 1)
