# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a ring costs beside one causal kernel call on the same tokens, on one device.

Fraction of ideal = the call's time / the sum of the members' compute times, forward and backward.
Transfers are not in it: whether they are hidden is another question (`ring_timeline`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_hdp.runtime.attention import Kernel, ring_attention
from megatron_hdp.testing.virtual_ranks import VirtualRank, lone_member

Row = dict[str, Any]
Heads = tuple[int, int, int]
"""Query heads, key/value heads, head dimension."""
_MOST_WARMED = 8192
_CALLS = 8
"""Calls timed together, so that a GPU's queue is never empty for the first one's sake."""


def packed_lengths(s: int) -> tuple[int, ...]:
    """A pack of four: a half, a quarter and two eighths."""
    return s // 2, s // 4, s // 8, s // 8


def measure_rings(
    lengths: Sequence[int],
    ring_sizes: Sequence[int],
    kernel: Kernel,
    *,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> list[Row]:
    """One row for each ring size, all beside the same ideal, measured in turns.

    A ring's first and last member are timed: a member's cost is linear in its index (it has index
    steps of one shape and P-1-index of the other), so their mean is the mean of all.

    A machine's speed drifts, so no figure comes from two times of different moments: a round runs
    the ideal, then every ring, and a ring is held against the mean of the ideals before and after.

    Args:
        lengths: the sequences, multiples of twice every ring size.
        heads: query heads, key/value heads, head dimension.
        repeats: rounds; the median of their ratios counts, and the spread is their quartiles.
    """
    options: Any = {"heads": heads, "dtype": dtype, "device": device}
    whole = lone_member(lengths, 1, 0, **options)
    members = {
        size: [lone_member(lengths, size, index, **options) for index in sorted({0, size - 1})]
        for size in ring_sizes
    }
    ideals: list[float] = []
    sums: dict[int, list[float]] = {size: [] for size in ring_sizes}

    def ideal() -> float:
        return seconds(lambda: one_call(whole, kernel), device)

    for rank in (whole, *(member for sampled in members.values() for member in sampled)):
        _warm(rank, kernel)
    ideals.append(ideal())
    for _ in range(repeats):
        for size, sampled in members.items():
            times = [seconds(_run(member, kernel), device) for member in sampled]
            sums[size].append(size * statistics.fmean(times))
        ideals.append(ideal())
    return [
        _row(lengths, size, heads, dtype, ideals, sums[size], len(members[size]))
        for size in ring_sizes
    ]


def measure_local(
    lengths: Sequence[int],
    kernel: Kernel,
    plain: Callable[[VirtualRank], torch.Tensor],
    *,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> Row:
    """What HDP's attention costs for a pack of local sequences over a plain call, under autograd.

    Both forward and backward; rounds of both in turn, each between two of the other.

    Args:
        plain: attention of the rank's whole pack in any differentiable way, [T, H, D].
    """
    rank = lone_member(lengths, 1, 0, heads=heads, dtype=dtype, device=device)
    for x in rank.inputs:
        x.requires_grad_()

    def hdp() -> torch.Tensor:
        q, k, v = rank.inputs
        scale = q.shape[-1] ** -0.5
        return ring_attention(
            q, k, v, rank.state, kernel=kernel, softmax_scale=scale, layer_number=1
        )

    def timed(attention: Callable[[], torch.Tensor]) -> float:
        def run() -> None:
            for _ in range(_CALLS):
                torch.autograd.grad(attention(), rank.inputs, rank.grad_out)

        return seconds(run, device) / _CALLS

    def beside() -> torch.Tensor:
        return plain(rank)

    timed(hdp)
    plain_s = [timed(beside), timed(beside)][1:]
    hdp_s = []
    for _ in range(repeats):
        hdp_s.append(timed(hdp))
        plain_s.append(timed(beside))
    around = [statistics.fmean(pair) for pair in pairwise(plain_s)]
    overheads = sorted(ours / theirs - 1 for ours, theirs in zip(hdp_s, around, strict=True))
    return {
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "longest": max(lengths),
        "overhead": round(statistics.median(overheads), 4),
        "overhead_spread": [round(overheads[i], 4) for i in _quartiles(len(overheads))],
        "hdp_s": round(statistics.median(hdp_s), 7),
        "plain_s": round(statistics.median(plain_s), 7),
        "repeats": repeats,
    }


def one_call(rank: VirtualRank, kernel: Kernel) -> None:
    """The kernel's own forward and backward over all that a rank holds, as one causal call."""
    q, k, v = rank.inputs
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, rank.state.own, True, scale)
    kernel.backward(rank.grad_out, q, k, v, out, lse, rank.state.own, True, scale)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """CPU seconds of this process, or seconds of the CUDA stream, that a call takes."""
    if device.type != "cuda":
        begun = time.process_time()
        run()
        return time.process_time() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _run(rank: VirtualRank, kernel: Kernel) -> Callable[[], object]:
    return lambda: rank.run(kernel)


def _warm(rank: VirtualRank, kernel: Kernel) -> None:
    """One run outside the figures, unless it would take as long as they do."""
    if rank.layout.num_tokens <= _MOST_WARMED or rank.inputs[0].is_cuda:
        rank.run(kernel)


def _quartiles(count: int) -> tuple[int, int]:
    """Places of the first and the last quartile among sorted values."""
    return count // 4, count - 1 - count // 4


def _row(
    lengths: Sequence[int],
    size: int,
    heads: Heads,
    dtype: torch.dtype,
    ideals: list[float],
    sums: list[float],
    sampled: int,
) -> Row:
    total = sum(lengths)
    around = [statistics.fmean(pair) for pair in pairwise(ideals)]
    ratios = sorted(ideal / ring for ideal, ring in zip(around, sums, strict=True))
    flop = 14 * heads[0] * heads[2] * sum(length * length / 2 for length in lengths)
    return {
        "s": total,
        "ring": size,
        "shard_tokens": total // size,
        "packed": len(lengths) > 1,
        "sequences": len(lengths),
        "fraction_of_ideal": round(statistics.median(ratios), 4),
        "fraction_spread": [round(ratios[i], 4) for i in _quartiles(len(ratios))],
        "ideal_s": round(statistics.median(ideals), 6),
        "ring_s": round(statistics.median(sums), 6),
        "tflops": round(flop / statistics.median(sums) / 1e12, 4),
        "sampled_members": sampled,
        "repeats": len(sums),
        "heads": heads[0],
        "groups": heads[1],
        "head_dim": heads[2],
        "dtype": str(dtype).removeprefix("torch."),
    }
