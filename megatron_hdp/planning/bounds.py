# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Lower bounds on the time of a step, whatever the plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.naive import minimal_degree

IntLengths = NDArray[np.int64]


def lower_bound(
    lengths: IntLengths, num_ranks: int, capacity: int, cost: CostModel, pipeline_depth: int = 1
) -> float:
    """Seconds that no plan of these sequences can beat: the largest of five bounds.

    *Area.* In a step of length t, a sequence s runs on some ring P >= ceil(s/C) with T(s, P) <= t
    and uses the area P T(s, P) of rank-seconds. P T(s, P) never falls with P: where hops are hidden
    it is the sequence's work, where they are not each hop adds its whole transfer. (With windowed
    layers the work is `CostModel.squares` of P, which rises with P, and all hops together carry
    rows that rise with P, per hop by no less than P/(P+1) of the last: see
    `windows.seen_rows`, a sum of concave functions of i/P. That is all that is used.) So the least
    area is at the smallest allowed P, A(s, t); and A falls with t, for a larger t only allows more.
    All areas, and the fixed cost of at least ceil(tokens / C) micro-batches, must fit in N t:
    the least such t is a bound. It is found by bisection from below, so rounding keeps it valid.
    With p stages each rank is p devices that share the work, so the same area is spread over p N.

    *Longest.* The longest sequence takes at least its best time over all P.

    *Exclusion.* Two sequences that each need more than half of the ranks share a rank, so their
    micro-batches follow each other, or are one: their best times add up, on each stage a p-th.

    *Path.* With p stages that sequence passes them one after another, forward and backward: its
    whole time, not divided by p. Without stages this is the bound before.

    Rings are at least ceil(s/C) wide here, or all ranks for a sequence that fits with offload only;
    a plan that offloads more could use narrower ones, which matters where hops are not hidden.

    *Window.* On stage 0 of a member of the longest sequence's ring of P, between the start of its
    forward and the end of its backward, T(P) passes; 1F1B runs there p-1 other forwards and p-1
    other backwards only, of different micro-batches of at most C tokens per rank. What these
    cannot fill is idle: with the area bound, N t >= area / p + P max(0, T(P) (p-1)/p - fill), where
    P fill is at most the larger share of the densest (p-1) P C other tokens plus the smaller share
    of the next ones. Work beyond the least in the window adds to the area what it takes from the
    idle time. The least over P of this and of T(P) is a bound.
    """
    lengths = np.sort(np.asarray(lengths, np.int64))[::-1]
    micro_batches = -(-int(lengths.sum()) // capacity)
    fixed = cost.fixed_s * max(micro_batches, num_ranks if pipeline_depth == 1 else 1)
    longest = best_time(int(lengths[0]), num_ranks, capacity, cost) + cost.fixed_s
    degrees = np.minimum(-(-lengths // capacity), num_ranks)
    least = degrees * cost.sequence_s(lengths, degrees)
    times = cost.sequence_s(lengths, degrees)
    floor = (float(least.sum()) + fixed) / (num_ranks * pipeline_depth)
    area = _area_bound(lengths, times, least, fixed, num_ranks, capacity, cost, pipeline_depth)
    wide = lengths[degrees > num_ranks // 2]
    exclusive = sum(best_time(int(s), num_ranks, capacity, cost) for s in wide) / pipeline_depth
    longest = max(longest, exclusive)
    if pipeline_depth == 1:
        return max(floor, longest, area)
    window = _window_bound(lengths, least, floor, num_ranks, capacity, cost, pipeline_depth)
    return max(floor, longest, area, window)


def best_time(length: int, num_ranks: int, capacity: int, cost: CostModel) -> float:
    """min over P of T(s, P), P from ceil(s/C) to N."""
    sizes = np.arange(min(minimal_degree(length, capacity), num_ranks), num_ranks + 1)
    return float(cost.sequence_s(np.full(len(sizes), length), sizes).min())


def _area_bound(
    lengths: IntLengths,
    times: NDArray[np.float64],
    least: NDArray[np.float64],
    fixed: float,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    depth: int,
) -> float:
    """The least t whose areas fit. Only sequences slower than t at their smallest ring matter."""
    low = (float(least.sum()) + fixed) / (num_ranks * depth)
    high = max(2 * low, float(times.max()) + cost.fixed_s)
    tables: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def fits(t: float) -> bool:
        slow = times > t * (1 + 1e-12)
        total = fixed + float(least[~slow].sum())
        for length in lengths[slow].tolist():
            if length not in tables:
                first = min(minimal_degree(length, capacity), num_ranks)
                sizes = np.arange(first, num_ranks + 1)
                found = cost.sequence_s(np.full(len(sizes), length), sizes)
                tables[length] = found, sizes * found
            found, areas = tables[length]
            allowed = np.flatnonzero(found <= t)
            if not len(allowed):
                return False
            total += float(areas[allowed[0]])
        return total <= num_ranks * depth * t

    if fits(low):
        return low
    for _ in range(40):
        middle = 0.5 * (low + high)
        if fits(middle):
            high = middle
        else:
            low = middle
        if high - low < 1e-4 * high:
            break
    return low


def _window_bound(
    lengths: IntLengths,
    least: NDArray[np.float64],
    floor: float,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    depth: int,
) -> float:
    """The idle time that the longest sequence forces on its ring's first stages."""
    first = min(minimal_degree(int(lengths[0]), capacity), num_ranks)
    sizes = np.arange(first, num_ranks + 1)
    times = cost.sequence_s(np.full(len(sizes), lengths[0]), sizes)
    order = np.argsort(-least[1:] / lengths[1:], kind="stable") + 1
    tokens = np.concatenate(([0], np.cumsum(lengths[order])))
    work = np.concatenate(([0.0], np.cumsum(least[order])))
    held = (depth - 1) * sizes * float(capacity)
    densest = np.interp(held, tokens, work)
    both = np.interp(2 * held, tokens, work)
    more = max(cost.forward_share, 1 - cost.forward_share)
    fill = (more * densest + (1 - more) * (both - densest)) / depth
    fixed = (depth - 1) * cost.fixed_s / depth
    idle = np.maximum(0.0, sizes * (times * (depth - 1) / depth - fixed) - fill) / num_ranks
    return float(np.maximum(floor + idle, times).min())
