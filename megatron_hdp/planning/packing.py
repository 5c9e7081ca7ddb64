# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Local sequences to ranks, and a rank's sequences to its micro-batches."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Ints = NDArray[np.int64]


def longest_first(weights: FloatArray, loads: FloatArray) -> Ints:
    """Each item, in the given falling order, to the least loaded rank (ties: the lower rank)."""
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    ranks = np.empty(len(weights), np.int64)
    replace = heapq.heapreplace
    for i, weight in enumerate(weights.tolist()):
        load, rank = heap[0]
        ranks[i] = rank
        replace(heap, (load + weight, rank))
    return ranks


def first_fit(
    lengths: Ints, rank_of: Ints, room: Ints, ring_slots: Ints, capacity: int
) -> tuple[Ints, Ints]:
    """First fit of every rank's sequences (falling length) into micro-batches, all ranks at once.

    Returns:
        slot_of [n]; counts [N], the ring micro-batches included, at least 1.
    """
    ranks = len(room)
    by_rank = np.argsort(rank_of, kind="stable")
    per_rank = np.bincount(rank_of, minlength=ranks)
    first = np.cumsum(per_rank) - per_rank
    free = np.full((ranks, 2), capacity, np.int64)
    free[:, 0] = room
    slot_of = np.empty(len(lengths), np.int64)
    base = np.maximum(ring_slots - 1, 0)
    for turn in range(int(per_rank.max(initial=0))):
        who = np.flatnonzero(per_rank > turn)
        items = by_rank[first[who] + turn]
        size = lengths[items]
        fits = free[who] >= size[:, None]
        if not fits[:, -1].all():
            free = np.hstack((free, np.full((ranks, 2), capacity, np.int64)))
            fits = free[who] >= size[:, None]
        where = fits.argmax(1)
        free[who, where] -= size
        slot_of[items] = base[who] + where
    counts = np.maximum(ring_slots, 1)
    np.maximum.at(counts, rank_of, slot_of + 1)
    return slot_of, counts
