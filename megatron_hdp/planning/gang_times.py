# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""When and where rings of exact sizes run: list scheduling of jobs that need several ranks at once.

First the rings wider than a node: whenever ranks are free, the widest one that fits starts. Rings
within a node then fill what is left beside and behind these, longest first, and delay none of them.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.cost import FloatArray

Ints = NDArray[np.int64]

_SAME_TIME = 1 + 1e-9


class TimedRing(NamedTuple):
    """One ring's place in a step."""

    start_s: float
    seconds: float
    item: int
    ranks: Ints


def timed_rings(sizes: Ints, seconds: FloatArray, ranks: int, per_node: int) -> list[TimedRing]:
    """All rings, by start.

    Args:
        sizes: [R] members, at least 2; seconds: [R], the fixed part included.
        ranks: N; per_node: ranks of a node, which rings of that size or smaller do not leave.
    """
    wide = np.flatnonzero(sizes > per_node)
    found = _wide(wide, sizes, seconds, ranks, per_node)
    narrow = np.flatnonzero(sizes <= per_node)
    if len(narrow):
        found += _Nodes(found, ranks, per_node).place(narrow, sizes, seconds)
    return sorted(found, key=lambda ring: (ring.start_s, ring.item))


def _wide(
    items: Ints, sizes: Ints, seconds: FloatArray, ranks: int, per_node: int
) -> list[TimedRing]:
    """Whenever ranks are free, the widest ring that fits; whole nodes first."""
    queue = items[np.lexsort((-seconds[items], -sizes[items]))].tolist()
    narrowness = (-sizes[queue]).tolist()
    free_at = np.zeros(ranks)
    node = np.arange(ranks) // per_node
    now, found = 0.0, []
    while queue:
        free = np.flatnonzero(free_at <= now * _SAME_TIME)
        at = bisect.bisect_left(narrowness, -len(free))
        if at == len(queue):
            now = float(free_at[free_at > now * _SAME_TIME].min())
            continue
        item, width = queue.pop(at), -narrowness.pop(at)
        in_node = np.bincount(node[free])
        chosen = np.sort(free[np.argsort(-in_node[node[free]], kind="stable")[:width]])
        free_at[chosen] = now + float(seconds[item])
        found.append(TimedRing(now, float(seconds[item]), item, chosen))
    return found


class _Nodes:
    """Rings that do not leave their node, between the wider ones."""

    def __init__(self, wide: Iterable[TimedRing], ranks: int, per_node: int) -> None:
        self.per_node, self.ranks = per_node, ranks
        self.busy: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
        """[N] (start, end) of wider rings that are still to come, last one first."""
        for ring in sorted(wide, key=lambda ring: -ring.start_s):
            for rank in ring.ranks.tolist():
                self.busy[rank].append((ring.start_s, ring.start_s + ring.seconds))
        self.free_at = [0.0] * ranks

    def place(self, items: Ints, sizes: Ints, seconds: FloatArray) -> list[TimedRing]:
        """Each node in turn of its next event: the longest ring that ends in time, if any."""
        queues: dict[int, list[tuple[float, int]]] = {}
        for item in items.tolist():
            queues.setdefault(int(sizes[item]), []).append((-float(seconds[item]), item))
        for queue in queues.values():
            queue.sort()
        events = [(0.0, node) for node in range(-(-self.ranks // self.per_node))]
        found: list[TimedRing] = []
        while queues:
            now, node = heapq.heappop(events)
            free = self._free(node, now)
            best: tuple[float, int, int] | None = None
            for width, queue in queues.items():
                if width <= len(free):
                    at = bisect.bisect_left(queue, (now - free[width - 1][0], -1))
                    if at < len(queue) and (best is None or queue[at][0] < best[0]):
                        best = queue[at][0], width, at
            if best is None:
                after = self._next_event(node, now)
                if after is not None:
                    heapq.heappush(events, (after, node))
                continue
            _, width, at = best
            negative, item = queues[width].pop(at)
            if not queues[width]:
                del queues[width]
            end = now - negative
            while len(free) > width and free[width][0] >= end:
                free.pop(0)  # keeps those with more time for longer rings
            chosen = sorted(rank for _, rank in free[:width])
            for rank in chosen:
                self.free_at[rank] = end
            found.append(TimedRing(now, -negative, item, np.array(chosen, np.int64)))
            heapq.heappush(events, (now, node))
        return found

    def _free(self, node: int, now: float) -> list[tuple[float, int]]:
        """(until when, rank) of a node's free ranks, the longest free first."""
        found = []
        first = node * self.per_node
        for rank in range(first, min(first + self.per_node, self.ranks)):
            busy = self.busy[rank]
            if busy and busy[-1][0] <= now:
                self.free_at[rank] = max(self.free_at[rank], busy.pop()[1])
            if self.free_at[rank] <= now:
                found.append((busy[-1][0] if busy else np.inf, rank))
        found.sort(key=lambda entry: (-entry[0], entry[1]))
        return found

    def _next_event(self, node: int, now: float) -> float | None:
        """When more of a node's ranks are free, or a free one is taken; None: never again."""
        first = node * self.per_node
        times = []
        for rank in range(first, min(first + self.per_node, self.ranks)):
            if self.free_at[rank] > now:
                times.append(self.free_at[rank])
            elif self.busy[rank]:
                times.append(self.busy[rank][-1][0])
        return min(times, default=None)
