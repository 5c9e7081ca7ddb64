# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`naive`: Algorithm 1 of ByteScale, without offload.

What the paper leaves open, filled here: items are taken in the batch's order; a ring takes the
ranks with the fewest micro-batches; ties go to the lower rank; short sequences are packed best-fit
decreasing. A ring needs the same slot on every member, so packs first fill the slots below it.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.values import Plan, PlanError


def minimal_degree(length: int, capacity: int) -> int:
    """D(s) = ceil(s / C): the fewest ranks that hold a sequence (ByteScale, section 5.1)."""
    return -(-length // capacity)


def best_fit_packs(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: positions of sequences per pack of at most `capacity` tokens."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack), sorted
    for position in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[position])
        at = bisect.bisect_left(open_packs, (length, -1))
        if at == len(open_packs):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = open_packs.pop(at)
        packs[pack].append(position)
        bisect.insort(open_packs, (room - length, pack))
    return packs


def plan_naive(config: PlannerConfig, request: StepRequest) -> Plan:
    """Rings of minimal size, packs of short sequences, each to the ranks with fewest so far.

    Raises:
        PlanError: a sequence does not fit the whole domain.
    """
    builder = PlanBuilder(request.ids, request.lengths, config.num_ranks, config.capacity)
    check_fits(builder.lengths, config)
    long = np.flatnonzero(builder.lengths > config.capacity)
    short = np.flatnonzero(builder.lengths <= config.capacity)
    packs = [short[pack] for pack in best_fit_packs(builder.lengths[short], config.capacity)]
    free: list[tuple[int, int]] = []
    for sequence in long.tolist():
        degree = minimal_degree(int(builder.lengths[sequence]), config.capacity)
        ranks = np.argsort(builder.counts, kind="stable")[:degree]
        slot = int(builder.counts[ranks].max())
        free += [(k, int(r)) for r in ranks for k in range(int(builder.counts[r]), slot)]
        builder.add_ring(sorted(ranks.tolist()), slot, [sequence])
    free.sort()
    for pack in packs:
        if free:
            slot, rank = free.pop(0)
        else:
            rank = int(builder.counts.argmin())
            slot = int(builder.counts[rank])
        builder.add_local(rank, slot, pack)
    return builder.build(request.step, "naive")


def check_fits(lengths: NDArray[np.int64], config: PlannerConfig) -> None:
    """Raises PlanError when the longest sequence needs more than the domain."""
    longest = int(lengths.max())
    if longest > config.capacity * config.num_ranks:
        raise PlanError(
            f"a sequence of {longest} tokens does not fit {config.num_ranks} ranks of capacity "
            f"{config.capacity}, which hold {config.capacity * config.num_ranks}: give a capacity "
            f"of at least {-(-longest // config.num_ranks)}, or more ranks"
        )
