# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which rows meet in a layer with a sliding window of w: a token sees itself and w before it.

The two chunks of a shard are far apart, so step 0 takes each as a sequence of its own. Of every
other pair of chunks, rows that see all the keys go into one full call; those that see only the last
ones form a staircase, which a kernel's own window cuts; the rest is left out.

Members that see each other's rows are neighbours on both sides: chunk i and its mirror look back to
members i-1 and i+1. So K/V do not go round: a member gets from each other one just the rows that it
sees. All of it follows from the plan and the window, alike on all members. Only NumPy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron_hdp.planning.values import cut_points
from megatron_hdp.runtime.sharding import (
    BlockCall,
    Boundaries,
    MicroBatchLayout,
    Rows,
    call_boundaries,
    joined_rows,
)

Range = tuple[int, int]


@dataclass(frozen=True)
class WindowedCalls:
    """The kernel calls of a micro-batch in layers with one window, and the rows that they need.

    Hop h is with the members h places before and after me.
    """

    own: Boundaries
    """Step 0: one causal call over single chunks, local sequences and padding."""
    blocks: tuple[tuple[BlockCall, ...], ...]
    """Further calls of each hop. Their k_rows are among the rows received; hop 0: of my prefix."""
    received: tuple[int, ...]
    """Rows that come from the member before me in each hop; none in hop 0."""
    sent: tuple[Rows | None, ...]
    """Rows of my prefix that go to the member behind me in each hop; None: none."""


@dataclass(frozen=True)
class _Chunk:
    first: int
    """Position of its first token in the sequence."""
    end: int
    row: int
    """Row of its first token in its member's ring prefix."""

    def rows(self, first: int, end: int) -> Range:
        return self.row + first - self.first, self.row + end - self.first


class _Group(NamedTuple):
    """Rows that one kernel call takes, a range of q and of K for each sequence."""

    width: int | None
    """Window at the last row; None: every row sees all."""
    q_ranges: list[Range]
    k_ranges: list[Range]


def windowed_calls(layout: MicroBatchLayout, window: int) -> WindowedCalls:
    """The calls of `layout` with a window of `window` tokens before each token."""
    size = len(layout.ring or ())
    lengths = layout.sequence_lengths[: layout.num_ring_sequences]
    members = [_member_chunks(lengths, size, index) for index in range(size)]
    mine = members[layout.index] if members else []
    own = [chunk.end - chunk.first for pair in mine for chunk in pair]
    own += [*layout.rows_per_sequence[layout.num_ring_sequences :], layout.padding]
    own = [rows for rows in own if rows]
    blocks, received, sent = [], [], []
    for hop in range(size):
        source = members[(layout.index - hop) % size]
        groups = _meeting(mine, source, layout.index, hop, window)
        needed = _union(groups) if hop else [(0, layout.ring_tokens)]
        blocks.append(tuple(_call(group, needed) for group in groups))
        received.append(sum(_lengths(needed)) if hop else 0)
        behind = (layout.index + hop) % size
        wanted = _union(_meeting(members[behind], mine, behind, hop, window)) if hop else []
        sent.append(joined_rows(wanted) if wanted else None)
    return WindowedCalls(
        call_boundaries(own, own, window), tuple(blocks), tuple(received), tuple(sent)
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


def _meeting(
    queries: list[tuple[_Chunk, _Chunk]],
    keys: list[tuple[_Chunk, _Chunk]],
    index: int,
    hop: int,
    window: int,
) -> list[_Group]:
    """What member `index` computes with the member `hop` places before it.

    One full call, and one staircase for each of its widths, over all sequences, for each pair of
    chunks; no call has a row of q twice.
    """
    if hop == 0:
        pairs = [(1, 0)]
    elif hop <= index:  # an earlier member
        pairs = [(0, 0), (1, 0)]
    else:
        pairs = [(1, 0), (1, 1)]
    groups: list[_Group] = []
    for q_half, k_half in pairs:
        found: dict[int | None, _Group] = {}
        for q, k in zip(queries, keys, strict=True):
            for width, q_seen, k_seen in _parts(q[q_half], k[k_half], window):
                group = found.setdefault(width, _Group(width, [], []))
                group.q_ranges.append(q[q_half].rows(*q_seen))
                group.k_ranges.append(k[k_half].rows(*k_seen))
        groups += found.values()
    return groups


def _union(groups: list[_Group]) -> list[Range]:
    """The K rows of all calls, in order, none twice."""
    joined: list[Range] = []
    for first, end in sorted(rows for group in groups for rows in group.k_ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def _call(group: _Group, received: list[Range]) -> BlockCall:
    """The call, with its K rows counted among those that are received."""
    starts = [0, *accumulate(_lengths(received))]
    firsts = [first for first, _ in received]
    k_ranges = []
    for first, end in group.k_ranges:
        at = bisect_right(firsts, first) - 1
        moved = starts[at] - firsts[at]
        k_ranges.append((first + moved, end + moved))
    return BlockCall(
        joined_rows(group.q_ranges),
        joined_rows(k_ranges),
        call_boundaries(_lengths(group.q_ranges), _lengths(k_ranges), group.width),
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
