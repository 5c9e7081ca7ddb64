# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The event loop: tasks that wait for each other and share links.

A task advances at its natural rate (one over its duration), or slower where a link that it uses is
shared: then at the lowest of its links' max-min fair shares. Rates hold from event to event.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_hdp.simulation.links import Floats, Flows, Ints, Traffic, fair_rates


@dataclass(frozen=True)
class Tasks:
    """What must run, and in which order."""

    seconds: Floats
    """[T] duration of a task that nothing slows down."""
    before: Ints
    """[E] an edge: task `after[i]` starts `delay[i]` seconds after `before[i]` ended, or later."""
    after: Ints
    delay: Floats


class DeadlockError(RuntimeError):
    """Tasks wait for each other in a cycle."""


def run(tasks: Tasks, traffics: list[Traffic]) -> tuple[Floats, Floats]:
    """(start, end), each [T] seconds.

    Raises:
        DeadlockError: some tasks can never start.
    """
    return _Loop(tasks, [traffic.flows(tasks.seconds) for traffic in traffics]).run()


class _Loop:
    def __init__(self, tasks: Tasks, flows: list[Flows]) -> None:
        count = len(tasks.seconds)
        self.seconds = tasks.seconds.tolist()
        self.start, self.end = [np.nan] * count, [np.nan] * count
        order = np.argsort(tasks.before, kind="stable")
        self.successors = tasks.after[order].tolist()
        self.delays = tasks.delay[order].tolist()
        self.first = np.searchsorted(tasks.before[order], np.arange(count + 1)).tolist()
        self.pending = np.bincount(tasks.after, minlength=count).tolist()
        self.ready = [0.0] * count
        self.heap: list[tuple[float, int, int, int]] = []
        self.shared = _Shared(tasks.seconds, flows)

    def run(self) -> tuple[Floats, Floats]:
        for task, pending in enumerate(self.pending):
            if not pending:
                self.heap.append((0.0, _START, task, 0))
        heap, shared = self.heap, self.shared
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                _, kind, task, version = heapq.heappop(heap)
                if kind == _START:
                    self._begin(task, now)
                elif task not in shared.on or shared.version[task] == version:
                    self._finish(task, now)
            if shared.changed:
                for end, task in shared.new_ends(now):
                    heapq.heappush(heap, (end, _END, task, shared.version[task]))
        starts, ends = np.array(self.start), np.array(self.end)
        stuck = int(np.isnan(ends).sum())
        if stuck:
            raise DeadlockError(
                f"{stuck} of {len(ends)} micro-batches wait for each other for ever"
            )
        return starts, ends

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        if task in self.shared.on:
            self.shared.begin(task, now)
        else:
            heapq.heappush(self.heap, (now + self.seconds[task], _END, task, 0))

    def _finish(self, task: int, now: float) -> None:
        self.end[task] = now
        if task in self.shared.on:
            self.shared.finish(task, now)
        for i in range(self.first[task], self.first[task + 1]):
            after = self.successors[i]
            self.ready[after] = max(self.ready[after], now + self.delays[i])
            self.pending[after] -= 1
            if not self.pending[after]:
                heapq.heappush(self.heap, (self.ready[after], _START, after, 0))


_START, _END = 1, 0
"""Ends before starts at the same time, so that a link is free for who comes."""


class _Shared:
    """The running tasks that use links which can be too busy."""

    def __init__(self, seconds: Floats, flows: list[Flows]) -> None:
        self.flows = [flow for flow in flows if len(flow.task)]
        self.on = {int(task) for flow in self.flows for task in np.unique(flow.task)}
        self.natural = 1 / np.maximum(seconds, 1e-300)
        self.running: list[int] = []
        self.rate = np.zeros(len(seconds))
        self.left = np.ones(len(seconds))
        self.since = 0.0
        self.version: dict[int, int] = dict.fromkeys(self.on, 0)
        self.changed = False
        self._fresh: set[int] = set()

    def begin(self, task: int, now: float) -> None:
        self._advance(now)
        self.running.append(task)
        self._fresh.add(task)
        self.changed = True

    def finish(self, task: int, now: float) -> None:
        self._advance(now)
        self.running.remove(task)
        self.changed = True

    def _advance(self, now: float) -> None:
        if now > self.since and self.running:
            self.left[self.running] -= self.rate[self.running] * (now - self.since)
        self.since = now

    def new_ends(self, now: float) -> list[tuple[float, int]]:
        """Shares the links anew; (end, task) of every task whose rate is another one now."""
        self.changed = False
        tasks = np.array(self.running, np.int64)
        rates = self.natural[tasks].copy()
        for flows in self.flows:
            rates = np.minimum(rates, self._fair(flows, tasks))
        found = []
        for task, rate in zip(self.running, rates.tolist(), strict=True):
            if task in self._fresh or rate != self.rate[task]:
                self.rate[task] = rate
                self.version[task] += 1
                found.append((now + max(0.0, float(self.left[task])) / rate, task))
        self._fresh.clear()
        return found

    def _fair(self, flows: Flows, tasks: Ints) -> Floats:
        flow, link, edges = flows.select(tasks)
        natural = self.natural[tasks]
        demand = natural * flows.edge_bytes[tasks]
        load = np.bincount(link, weights=edges * demand[flow], minlength=len(flows.capacity))
        if (load <= flows.capacity * (1 + 1e-12)).all():
            return natural
        rates = fair_rates(demand, flow, link, edges, flows.capacity)
        fair = natural.copy()
        np.divide(rates, flows.edge_bytes[tasks], out=fair, where=flows.edge_bytes[tasks] > 0)
        # exactly natural where nothing slows down, so that no new end is computed
        return np.where(rates >= demand, natural, fair)
