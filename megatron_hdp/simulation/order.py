# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which micro-batch waits for which: Megatron's 1F1B, every stage of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import Plan
from megatron_hdp.simulation.links import Floats, Ints
from megatron_hdp.simulation.work import Units


@dataclass(frozen=True)
class Operations:
    """Forwards, then backwards, of every stage and micro-batch: (phase, stage, micro-batch).

    Operation (phase, j, m) has the number (phase p + j) M + m; -1 stands for none.
    """

    depth: int
    unit_of: Ints
    """[M]"""
    units: int
    previous: Ints
    """[O] what the same stage of the same rank runs before."""
    neighbour: Ints
    """[O] the same micro-batch on the stage that it comes from."""

    @classmethod
    def build(cls, plan: Plan, units: Units, depth: int) -> Operations:
        counts = plan.micro_batch_counts.astype(np.int64)
        first = plan.first_micro_batch[:-1]
        total = int(plan.first_micro_batch[-1])
        rank = np.repeat(np.arange(plan.num_ranks), counts)
        slot = np.arange(total) - first[rank]
        previous = np.empty((2, depth, total), np.int64)
        neighbour = np.full((2, depth, total), -1, np.int64)
        for stage in range(depth):
            warm_up = np.minimum(depth - 1 - stage, counts)[rank]
            forward = stage * total + first[rank]
            backward = (depth + stage) * total + first[rank]
            previous[0, stage] = _before_forward(slot, warm_up, forward, backward)
            previous[1, stage] = _before_backward(slot, warm_up, counts[rank], forward, backward)
            if stage > 0:
                neighbour[0, stage] = (stage - 1) * total + np.arange(total)
            if stage < depth - 1:
                neighbour[1, stage] = (depth + stage + 1) * total + np.arange(total)
        return cls(depth, units.of, units.count, previous.ravel(), neighbour.ravel())

    @property
    def tasks(self) -> Ints:
        """[O] the task of an operation: all members of a ring share one."""
        blocks = np.arange(2 * self.depth)[:, None] * self.units
        return (blocks + self.unit_of[None]).ravel()

    def ready(self, end: Floats, delay: Floats) -> Floats:
        """[O] when a member could have started, had its ring not waited for others.

        Args:
            end: [O] when operations ended; delay: [O] after the neighbouring stage's.
        """
        own = np.where(self.previous >= 0, end[self.previous], 0.0)
        other = np.where(self.neighbour >= 0, end[self.neighbour] + delay, 0.0)
        return np.maximum(own, other)


def _before_forward(slot: Ints, warm_up: Ints, forward: Ints, backward: Ints) -> Ints:
    """w forwards in a row, then each one behind a backward."""
    first_steady = np.where(warm_up > 0, forward + warm_up - 1, -1)
    in_warm_up = np.where(slot > 0, forward + slot - 1, -1)
    steady = np.where(slot == warm_up, first_steady, backward + slot - warm_up - 1)
    return np.where(slot < warm_up, in_warm_up, steady)


def _before_backward(slot: Ints, warm_up: Ints, count: Ints, forward: Ints, backward: Ints) -> Ints:
    """Behind forward w + i while there are any, then backwards in a row."""
    cool_down = np.where(slot > 0, backward + slot - 1, forward + count - 1)
    return np.where(slot + warm_up < count, forward + slot + warm_up, cool_down)


def in_flight_peak(of_micro_batch: Floats, plan: Plan, depth: int) -> NDArray[np.float64]:
    """[p, N] largest sum over the micro-batches whose forward ran and backward did not end."""
    counts = plan.micro_batch_counts
    rank = np.repeat(np.arange(plan.num_ranks), counts)
    slot = np.arange(len(rank)) - plan.first_micro_batch[rank]
    grid = np.zeros((plan.num_ranks, int(counts.max()) + 1))
    grid[rank, slot + 1] = of_micro_batch
    total = np.cumsum(grid, axis=1)
    peaks = np.empty((depth, plan.num_ranks))
    for stage in range(depth):
        width = min(depth - stage, int(counts.max()))
        peaks[stage] = (total[:, width:] - total[:, : total.shape[1] - width]).max(1)
    return peaks
