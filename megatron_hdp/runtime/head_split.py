# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What ring members that split heads hold together, and where each one's rows are in it.

A ring of P falls into P/u groups of u neighbours. Group g's first chunks follow each other, and so
do their mirrors: together they are the shard that member g of a ring of P/u would hold, for
floor(gu * s / 2P) = floor(g * s / (2P/u)). So the ring's own code runs the short rings, one for
each place in a group, on these shards; only the order of rows differs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.runtime.sharding import (
    Boundaries,
    MicroBatchLayout,
    Piece,
    Rows,
    call_boundaries,
    joined_rows,
    ring_shard,
)


@dataclass(frozen=True)
class HeadSplit:
    """One member's view of its group."""

    members: tuple[int, ...]
    """HDP ranks of the group, in ring order."""
    place: int
    """Mine in the group, which says whose heads I have."""
    shared: MicroBatchLayout
    """The group's shard, in the ring of those who have my place in their groups."""
    rows: tuple[Rows, ...]
    """Rows of `shared` that each member's ring prefix is, in the prefix's order."""
    rest: Boundaries | None
    """One causal call over what is behind the ring prefix; None: nothing is."""


def split_heads(layout: MicroBatchLayout) -> HeadSplit | None:
    """The split of a layout's `head_degree`; None where heads stay whole."""
    degree = layout.head_degree
    if degree == 1:
        return None
    assert layout.ring is not None
    size = len(layout.ring)
    first, place = layout.index - layout.index % degree, layout.index % degree
    # Named by their order: a layout knows its sequences' lengths, and pieces that are not empty.
    sequences = tuple(
        Sequence(number, length)
        for number, length in enumerate(layout.sequence_lengths[: layout.num_ring_sequences])
    )
    short = layout.ring[place::degree]
    micro_batch = (
        MicroBatch(0, Ring(short), sequences, ())
        if len(short) > 1
        else MicroBatch(0, None, (), sequences)
    )
    shared = MicroBatchLayout.build(micro_batch, layout.ring[layout.index])
    rest = [*layout.rows_per_sequence[layout.num_ring_sequences :], layout.padding]
    rest = [rows for rows in rest if rows]
    return HeadSplit(
        layout.ring[first : first + degree],
        place,
        shared,
        tuple(
            _rows(shared.pieces, [p for s in sequences for p in ring_shard(s, size, member)])
            for member in range(first, first + degree)
        ),
        call_boundaries(rest, rest) if rest else None,
    )


def _rows(held: Seq[Piece], wanted: Seq[Piece]) -> Rows:
    """Rows of the wanted pieces, in their order, where the held ones follow each other."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for sequence, first, end in held:
        pieces.setdefault(sequence, []).append((first, end, row))
        row += end - first
    ranges = []
    for sequence, start, stop in wanted:
        at = next(
            row + start - first
            for first, end, row in pieces[sequence]
            if first <= start and stop <= end
        )
        ranges.append((at, at + stop - start))
    return joined_rows(ranges) if ranges else slice(0, 0)
