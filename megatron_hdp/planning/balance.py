# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`dp-balance` and `pp-balance`: Algorithm 2 of ByteScale, by work instead of micro-batch counts.

What the paper leaves open, filled here (docs/planning.md): sixteen buckets of equal work; delta is
5 % of the largest load; a pass gives one item to each rank that lags, then loads are compared
again; when all ranks are level the next item goes to the least loaded one; an item that needs D
ranks takes the D least loaded; short sequences are packed best-fit per bucket; loads are predicted
times without waits. DP-Balance picks from the first bucket that is left, PP-Balance from all of
them in turn.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.degrees import solve_eq3
from megatron_hdp.planning.listing import Listing
from megatron_hdp.planning.naive import best_fit_packs, check_fits
from megatron_hdp.planning.values import Plan

_BUCKETS = 16
_DELTA = 0.05


class _Item(NamedTuple):
    """A sequence on a ring, or a pack of short ones."""

    sequences: NDArray[np.int64]
    ranks: int
    ratio: float
    seconds: float


def plan_dp_balance(config: PlannerConfig, request: StepRequest) -> Plan:
    """Similar lengths at the same time: for steps without pipeline stages."""
    return _plan(config, request, "dp-balance")


def plan_pp_balance(config: PlannerConfig, request: StepRequest) -> Plan:
    """Different pipelines take different lengths: for steps with pipeline stages."""
    return _plan(config, request, "pp-balance")


def _plan(config: PlannerConfig, request: StepRequest, strategy: str) -> Plan:
    lengths = np.asarray(request.lengths, np.int64)
    check_fits(lengths, config)
    buckets = deque(_buckets(config, lengths))
    listing = Listing(config, request)
    loads = np.zeros(config.num_ranks)
    while buckets:
        lag = loads.max() - loads
        lagging = np.flatnonzero(lag > _DELTA * loads.max())
        if not len(lagging):
            lagging = np.array([int(loads.argmin())])
        served: set[int] = set()
        for rank in lagging[np.argsort(loads[lagging], kind="stable")].tolist():
            if rank in served or not buckets:
                continue
            item = buckets[0].popleft()
            if strategy == "pp-balance":
                buckets.rotate(-1)
            buckets = deque(bucket for bucket in buckets if bucket)
            served.update(_assign(item, rank, listing, loads))
    return listing.build(strategy)


def _assign(item: _Item, rank: int, listing: Listing, loads: NDArray[np.float64]) -> list[int]:
    """To the rank that lags, and the least loaded others when it needs more; returns the ranks."""
    if item.ranks == 1:
        listing.add_ring([rank], item.sequences, item.ratio)
        loads[rank] += item.seconds
        return [rank]
    others = np.argsort(loads, kind="stable")
    others = others[others != rank][: item.ranks - 1]
    ranks = [rank, *others.tolist()]
    listing.add_ring(ranks, item.sequences, item.ratio)
    loads[ranks] += item.seconds
    return ranks


def _buckets(config: PlannerConfig, lengths: NDArray[np.int64]) -> list[deque[_Item]]:
    """Consecutive buckets of about equal work, longest sequences first."""
    cost = config.cost()
    order = np.argsort(-lengths, kind="stable")
    work = np.cumsum(cost.local_s(lengths[order]))
    bucket_of = np.minimum((work / work[-1] * _BUCKETS).astype(int), _BUCKETS - 1)
    buckets = []
    for number in range(_BUCKETS):
        members = order[bucket_of == number]
        if len(members):
            buckets.append(deque(_items(config, lengths, members)))
    return buckets


def _items(
    config: PlannerConfig, lengths: NDArray[np.int64], members: NDArray[np.int64]
) -> list[_Item]:
    cost = config.cost()
    items = []
    for position in members[lengths[members] > config.capacity].tolist():
        degree = solve_eq3(int(lengths[position]), config)
        size, length = np.array([degree.ranks]), lengths[[position]]
        seconds = float(cost.sequence_s(length, size)[0]) + cost.fixed_s
        items.append(_Item(np.array([position]), degree.ranks, degree.ratio, seconds))
    short = members[lengths[members] <= config.capacity]
    for pack in best_fit_packs(lengths[short], config.capacity):
        sequences = short[pack]
        seconds = float(cost.local_s(lengths[sequences]).sum()) + cost.fixed_s
        items.append(_Item(sequences, 1, 0.0, seconds))
    return sorted(items, key=lambda item: -item.seconds)
