# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which rows meet in a layer with a sliding window of w: a token sees itself and w before it.

The two chunks of a shard are far apart, so step 0 takes each as a sequence of its own. Of every
other pair of chunks, rows that see all the keys go into one full call; those that see only the last
ones form a staircase, which a kernel's own window cuts; the rest is left out. Only NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hdp.planning.values import cut_points
from megatron_hdp.runtime.sharding import (
    BlockCall,
    Boundaries,
    MicroBatchLayout,
    call_boundaries,
    joined_rows,
)

Range = tuple[int, int]


@dataclass(frozen=True)
class WindowedCalls:
    """The kernel calls of a micro-batch in layers with one window."""

    own: Boundaries
    """Step 0: one causal call over single chunks, local sequences and padding."""
    blocks: tuple[tuple[BlockCall, ...], ...]
    """Further calls with the K/V of each hop; hop 0: with this rank's own."""


@dataclass(frozen=True)
class _Chunk:
    first: int
    """Position of its first token in the sequence."""
    end: int
    row: int
    """Row of its first token in its member's ring prefix."""

    def rows(self, first: int, end: int) -> Range:
        return self.row + first - self.first, self.row + end - self.first


def windowed_calls(layout: MicroBatchLayout, window: int) -> WindowedCalls:
    """The calls of `layout` with a window of `window` tokens before each token."""
    size = len(layout.ring or ())
    lengths = layout.sequence_lengths[: layout.num_ring_sequences]
    members = [_member_chunks(lengths, size, index) for index in range(size)]
    mine = members[layout.index] if members else []
    own = [chunk.end - chunk.first for pair in mine for chunk in pair]
    own += [*layout.rows_per_sequence[layout.num_ring_sequences :], layout.padding]
    own = [rows for rows in own if rows]
    return WindowedCalls(
        call_boundaries(own, own, window),
        tuple(
            _hop_calls(mine, members[(layout.index - hop) % size], layout.index, hop, window)
            for hop in range(size)
        ),
    )


def _member_chunks(lengths: tuple[int, ...], size: int, index: int) -> list[tuple[_Chunk, _Chunk]]:
    """A member's two chunks of every ring sequence; either may be empty."""
    chunks, row = [], 0
    for length in lengths:
        cuts = cut_points(length, size)
        pair = []
        for number in (index, 2 * size - 1 - index):
            pair.append(_Chunk(cuts[number], cuts[number + 1], row))
            row += cuts[number + 1] - cuts[number]
        chunks.append((pair[0], pair[1]))
    return chunks


def _hop_calls(
    mine: list[tuple[_Chunk, _Chunk]],
    source: list[tuple[_Chunk, _Chunk]],
    index: int,
    hop: int,
    window: int,
) -> tuple[BlockCall, ...]:
    """The calls with one member's K/V; no call has a row of mine twice."""
    if hop == 0:
        pairs = [(1, 0)]
    elif hop <= index:  # an earlier member
        pairs = [(0, 0), (1, 0)]
    else:
        pairs = [(1, 0), (1, 1)]
    return tuple(
        call
        for q_half, k_half in pairs
        for call in _pair_calls(
            [(q[q_half], k[k_half]) for q, k in zip(mine, source, strict=True)], window
        )
    )


def _pair_calls(chunks: list[tuple[_Chunk, _Chunk]], window: int) -> Iterator[BlockCall]:
    """One full call, and one staircase for each of its widths, over all sequences."""
    found: dict[int | None, list[tuple[Range, Range]]] = {}
    for q, k in chunks:
        for width, queries, keys in _parts(q, k, window):
            found.setdefault(width, []).append((q.rows(*queries), k.rows(*keys)))
    for width, ranges in found.items():
        q_ranges, k_ranges = ([pair[side] for pair in ranges] for side in (0, 1))
        yield BlockCall(
            joined_rows(q_ranges),
            joined_rows(k_ranges),
            call_boundaries(_lengths(q_ranges), _lengths(k_ranges), width),
        )


def _parts(q: _Chunk, k: _Chunk, window: int) -> Iterator[tuple[int | None, Range, Range]]:
    """(window at the last row or None, positions of queries, of keys) of q behind k.

    A staircase has no more rows than keys: FlashAttention takes an open right side for max_k keys.
    """
    if q.end == q.first or k.end == k.first:
        return
    split = min(max(q.first, k.first + window + 1), q.end)
    if split > q.first:
        yield None, (q.first, split), (k.first, k.end)
    end = min(q.end, k.end + window)
    if end > split:
        yield window - (end - k.end), (split, end), (max(k.first, split - window), k.end)


def _lengths(ranges: list[Range]) -> list[int]:
    return [end - first for first, end in ranges]
