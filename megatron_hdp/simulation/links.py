# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Links that several transfers share: max-min fair rates, as per-flow fair queueing gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """Transfers over shared links of one kind, one entry per transfer.

    All transfers of a task carry the same bytes and advance together: a ring's hops, or the host
    copies of its members.
    """

    task: Ints
    """[I]"""
    link: Ints
    """[I]"""
    place: Ints
    """[I] the stage of a rank that the transfer belongs to; it runs one task at a time."""
    edge_bytes: Floats
    """[T] bytes of one transfer, by task."""
    capacity: Floats
    """[L] bytes per second."""

    def bytes_by_link(self) -> Floats:
        """[L] everything that crosses a link in the step."""
        moved = self.edge_bytes[self.task]
        # without any entry bincount counts in integers
        return np.bincount(self.link, moved, len(self.capacity)).astype(np.float64)

    def flows(self, seconds: Floats) -> Flows:
        """By task, without the links that even the heaviest task of every place cannot overload.

        Args:
            seconds: [T] natural duration of every task.
        """
        rate = self.edge_bytes[self.task] / np.maximum(seconds[self.task], 1e-300)
        key = self.place * len(self.capacity) + self.link
        order = np.argsort(key, kind="stable")
        keys, starts = np.unique(key[order], return_index=True)
        worst = np.zeros(len(self.capacity))
        if len(keys):
            heaviest = np.maximum.reduceat(rate[order], starts)
            np.add.at(worst, keys % len(self.capacity), heaviest)
        keep = (worst > self.capacity * (1 + 1e-9))[self.link] & (rate > 0)
        pair = self.task[keep] * len(self.capacity) + self.link[keep]
        pairs, edges = np.unique(pair, return_counts=True)
        links = len(self.capacity)
        return Flows(
            pairs // links, pairs % links, edges.astype(np.float64), self.edge_bytes, self.capacity
        )


@dataclass(frozen=True)
class Flows:
    """Tasks on links that can be too busy; entries are sorted by task."""

    task: Ints
    """[I]"""
    link: Ints
    """[I]"""
    edges: Floats
    """[I] parallel transfers of the task over the link."""
    edge_bytes: Floats
    """[T]"""
    capacity: Floats
    """[L]"""

    def select(self, tasks: Ints) -> tuple[Ints, Ints, Floats]:
        """(position in `tasks`, link, edges) of every entry of some tasks."""
        first = np.searchsorted(self.task, tasks)
        count = np.searchsorted(self.task, tasks, side="right") - first
        ends = np.cumsum(count)
        total = int(ends[-1]) if len(ends) else 0
        at = np.arange(total) - np.repeat(ends - count, count) + np.repeat(first, count)
        return np.repeat(np.arange(len(tasks)), count), self.link[at], self.edges[at]


def fair_rates(demand: Floats, flow: Ints, link: Ints, edges: Floats, capacity: Floats) -> Floats:
    """[F] bytes per second of each flow's transfers: progressive filling.

    Args:
        demand: [F] what a flow would take alone, per transfer.
        flow, link, edges: [I] flow `flow[i]` has `edges[i]` transfers over `link[i]`.
        capacity: [L] bytes per second.
    """
    rates = demand.copy()
    rest = capacity.copy()
    still = np.ones(len(demand), bool)
    while still.any():
        growing = still[flow]
        weight = np.bincount(link[growing], weights=edges[growing], minlength=len(rest))
        level = np.full(len(rest), np.inf)
        np.divide(rest, weight, out=level, where=weight > 0)
        lowest = max(float(level.min()), 0.0)
        done = still & (demand <= lowest)
        if not done.any():
            tight = level <= lowest * (1 + 1e-12)
            done = np.zeros(len(demand), bool)
            done[flow[growing & tight[link]]] = True
            rates[done] = lowest
        used = done[flow]
        rest -= np.bincount(
            link[used], weights=edges[used] * rates[flow[used]], minlength=len(rest)
        )
        still &= ~done
    return rates
