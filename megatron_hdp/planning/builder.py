# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Collects placements, one ring or local sequence at a time, and makes them a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.values import IntArray, Plan


class PlanBuilder:
    """Placements of one step. Slots must end up without gaps; `build` fills what is left free."""

    def __init__(self, ids: IntArray, lengths: IntArray, num_ranks: int, capacity: int) -> None:
        self.ids = np.asarray(ids, np.int64)
        self.lengths = np.asarray(lengths, np.int64)
        self.num_ranks = num_ranks
        self.capacity = capacity
        self.counts = np.zeros(num_ranks, np.int32)
        self._ring_of = np.full(len(self.lengths), -1, np.int32)
        self._rank_of = np.full(len(self.lengths), -1, np.int32)
        self._slot_of = np.full(len(self.lengths), -1, np.int32)
        self._rings: list[Sequence[int]] = []
        self._ring_slots: list[int] = []

    def add_ring(
        self, ranks: Sequence[int], slot: int, sequences: Sequence[int] | IntArray
    ) -> None:
        """Puts sequences (by position in `lengths`) on a ring in `slot` of every member."""
        self._ring_of[sequences] = len(self._rings)
        self._slot_of[sequences] = slot
        self._rings.append(ranks)
        self._ring_slots.append(slot)
        self.counts[list(ranks)] = np.maximum(self.counts[list(ranks)], slot + 1)

    def add_local(self, rank: int, slot: int, sequences: Sequence[int] | IntArray) -> None:
        """Puts sequences whole on `rank` in `slot`."""
        self._rank_of[sequences] = rank
        self._slot_of[sequences] = slot
        self.counts[rank] = max(self.counts[rank], slot + 1)

    def add_locals(self, sequences: IntArray, rank_of: IntArray, slot_of: IntArray) -> None:
        """Puts many whole sequences, each on its own rank and slot."""
        self._rank_of[sequences] = rank_of
        self._slot_of[sequences] = slot_of
        np.maximum.at(self.counts, rank_of, np.asarray(slot_of, np.int32) + 1)

    def build(
        self,
        step: int,
        strategy: str,
        ratios: Mapping[tuple[int, int], float] | None = None,
        num_layers: int = 0,
        expert_ranks: int = 1,
    ) -> Plan:
        """The plan. Slots that nothing was put in, and ranks without any, run zero-loss.

        Args:
            ratios: offload ratio by (rank, slot); all others are 0.
            num_layers: layers per rank, for the memory rule under offload.
            expert_ranks: each such group of neighbours gets as many slots as its fullest rank.
        """
        counts = equal_counts(np.maximum(self.counts, 1), expert_ranks).astype(np.int32)
        sizes = [len(ranks) for ranks in self._rings]
        members = [rank for ranks in self._rings for rank in ranks]
        return Plan(
            step=step,
            strategy=strategy,
            num_ranks=self.num_ranks,
            capacity=self.capacity,
            ids=self.ids,
            lengths=self.lengths,
            ring_of=self._ring_of,
            rank_of=self._rank_of,
            slot_of=self._slot_of,
            ring_offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            ring_ranks=np.asarray(members, np.int32),
            ring_slots=np.asarray(self._ring_slots, np.int32),
            micro_batch_counts=counts,
            offload_ratios=_ratio_array(ratios or {}, counts),
            num_layers=num_layers,
        )


def _ratio_array(
    ratios: Mapping[tuple[int, int], float], counts: NDArray[np.int32]
) -> NDArray[np.float64]:
    """[M] by micro-batch number; empty when there is no offload."""
    if not ratios:
        return np.zeros(0)
    first = np.cumsum(counts) - counts
    array = np.zeros(int(counts.sum()))
    for (rank, slot), ratio in ratios.items():
        array[first[rank] + slot] = ratio
    return array
