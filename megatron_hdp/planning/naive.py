# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`naive`: Algorithm 1 of ByteScale.

What the paper leaves open, filled here: items are taken in the batch's order; a ring takes the
ranks with the fewest micro-batches; ties go to the lower rank; short sequences are packed best-fit
decreasing. A ring needs the same slot on every member, so packs first fill the slots below it.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.values import Plan


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
    """Rings of minimal size (Eq. 3), packs of short sequences, to the ranks with fewest so far.

    Raises:
        PlanError: a sequence does not fit the whole domain.
    """
    from megatron_hdp.planning.degrees import solve_eq3
    from megatron_hdp.planning.listing import Listing

    lengths = np.asarray(request.lengths, np.int64)
    check_fits(lengths, config)
    listing = Listing(config, request)
    for sequence in np.flatnonzero(lengths > config.capacity).tolist():
        degree = solve_eq3(int(lengths[sequence]), config)
        ranks = np.argsort(listing.counts, kind="stable")[: degree.ranks]
        listing.add_ring(ranks.tolist(), np.array([sequence]), degree.ratio)
    short = np.flatnonzero(lengths <= config.capacity)
    for pack in best_fit_packs(lengths[short], config.capacity):
        listing.add_pack(int(listing.counts.argmin()), short[pack])
    return listing.build("naive")


def check_fits(lengths: NDArray[np.int64], config: PlannerConfig) -> None:
    """Raises PlanError when the longest sequence needs more than the domain."""
    from megatron_hdp.planning.degrees import ratio_that_fits

    ratio_that_fits(int(lengths.max()), config)
