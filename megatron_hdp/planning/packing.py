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

    A longer one, which fits with offload only, has a micro-batch for itself.

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
        size = np.minimum(lengths[items], capacity)
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


def fill_waits(
    lengths: Ints, seconds: FloatArray, waits: list[tuple[float, int, int]], capacity: int
) -> Ints:
    """Each sequence into the longest wait that is left, where it fits in time and tokens.

    Args:
        lengths, seconds: [n] in falling length.
        waits: (seconds, rank, slot) that would pass idle.

    Returns:
        [n] index of a sequence's wait, -1 where none is long enough.
    """
    lengths = np.minimum(lengths, capacity)
    heap = [(-wait, number, capacity) for number, (wait, _, _) in enumerate(waits)]
    heapq.heapify(heap)
    found = np.full(len(lengths), -1, np.int64)
    for i, (length, takes) in enumerate(zip(lengths.tolist(), seconds.tolist(), strict=True)):
        while heap and heap[0][2] < length:
            heapq.heappop(heap)  # no room for it; what is left is less than a sequence
        if not heap:
            break
        left, number, room = heap[0]
        if takes <= -left:
            found[i] = number
            heapq.heapreplace(heap, (left + takes, number, room - length))
    return found
