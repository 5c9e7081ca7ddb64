# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What sharing experts asks of a plan: equal slots, and who waits for whom.

The ranks of an expert-parallel group exchange tokens inside every layer of every micro-batch. The
model of that, wherever a plan is timed: a slot's forward starts when the last rank of the group is
there and takes as long as the slowest one's; so does its backward. Rings join the groups of their
members. This errs on the slow side where arithmetic of the experts levels out what tokens differ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import Plan

Ints = NDArray[np.int64]


def equal_counts(counts: NDArray[np.integer], expert_ranks: int) -> Ints:
    """[N] every rank gets as many slots as the fullest of its `expert_ranks` neighbours."""
    fullest = np.asarray(counts, np.int64).reshape(-1, expert_ranks).max(1)
    return np.repeat(fullest, expert_ranks)


def meetings(plan: Plan, expert_ranks: int) -> Ints:
    """[M] a number for every micro-batch, the same where ranks wait for each other in layers.

    With `expert_ranks` 1 only members of a ring meet.
    """
    slots = int(plan.micro_batch_counts.max())
    label = np.arange(plan.num_ranks // expert_ranks * slots)
    if plan.num_rings:
        slot = np.repeat(plan.ring_slots, plan.ring_sizes).astype(np.int64)
        cell = plan.ring_ranks // expert_ranks * slots + slot
        first = plan.ring_offsets[:-1]
        while True:  # a ring gives its lowest number to all of its groups, until none changes
            lowest = np.repeat(np.minimum.reduceat(label[cell], first), plan.ring_sizes)
            if (lowest == label[cell]).all():
                break
            np.minimum.at(label, cell, lowest)
    rank = np.repeat(np.arange(plan.num_ranks), plan.micro_batch_counts)
    own_slot = np.arange(len(rank)) - plan.first_micro_batch[rank]
    found: Ints = label[rank // expert_ranks * slots + own_slot]
    return found
