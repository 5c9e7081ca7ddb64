# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which tokens a rank holds of a micro-batch, and which rows meet in each step of its ring.

A sequence on a ring of P ranks is cut in 2P chunks at floor(i * s / 2P); member i holds chunks i
and 2P-1-i (ByteScale, section 7; zigzag). Any ring size, any length, no padding. Only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import MicroBatch, Sequence, cut_points

Piece = tuple[int, int, int]
"""(sequence id, first token, one past the last token)."""


@dataclass(frozen=True)
class Boundaries:
    """One varlen call: sequences along the packed q rows and k rows. No sequence is empty."""

    cu_q: NDArray[np.int32]
    """[n+1] cumulative q rows."""
    cu_k: NDArray[np.int32]
    """[n+1] cumulative k rows."""
    max_q: int
    max_k: int
    window: int | None = None
    """Keys that a row sees before its own place, where a layer has a window. Counted as
    FlashAttention does: in a block that is not causal, the last row's place is the last key."""


Rows = slice | NDArray[np.int64]
"""Rows of a ring prefix; a slice where they are one range, so that taking them copies nothing."""


@dataclass(frozen=True)
class BlockCall:
    """One varlen call of a ring step. Full attention, never causal."""

    q_rows: Rows
    """Rows of my ring prefix."""
    k_rows: Rows
    """Rows of the source's ring prefix."""
    boundaries: Boundaries


@dataclass(frozen=True)
class RingStep:
    """What a member computes with the K/V of another one."""

    source: int
    """Ring index whose K/V arrive in this step."""
    call: BlockCall | None
    """None: nothing to compute, the K/V are passed on only."""


@dataclass(frozen=True)
class MicroBatchLayout:
    """One rank's part of one micro-batch: ring shards, then local sequences, then padding."""

    ring: tuple[int, ...] | None
    """HDP ranks of the ring, None for a micro-batch without one."""
    index: int
    """My place in the ring; 0 without one."""
    pieces: tuple[Piece, ...]
    """Token ranges to read, in this rank's token order."""
    positions: NDArray[np.int64]
    """[T] position of every token in its sequence; padding counts from 0."""
    num_tokens: int
    """T, a multiple of what was asked for, at least 1."""
    ring_tokens: int
    """The first `ring_tokens` rows belong to the ring."""
    padding: int
    """The last `padding` rows are masked tokens, a sequence of their own."""
    peer_ring_tokens: tuple[int, ...]
    """Ring rows of every member, in ring order."""
    sequence_lengths: tuple[int, ...]
    """Whole lengths of the ring's sequences, then of the local ones."""
    rows_per_sequence: tuple[int, ...]
    """Rows here of each of them, in the same order."""
    num_ring_sequences: int
    own: Boundaries
    """Step 0: one causal call over shards, local sequences and padding."""
    steps: tuple[RingStep, ...]
    """Steps 1 .. P-1, in the order in which K/V arrive; none where heads are split."""
    head_degree: int = 1
    """Neighbours in the ring that split heads among them (`head_split`); 1: none do."""

    @classmethod
    def build(cls, micro_batch: MicroBatch, rank: int, *, multiple_of: int = 1) -> MicroBatchLayout:
        """The layout of `micro_batch` on HDP rank `rank`.

        Args:
            multiple_of: total tokens are padded to a multiple of this (TP, or what a dtype needs).
        """
        ring = micro_batch.ring.ranks if micro_batch.ring is not None else ()
        index = ring.index(rank) if ring else 0
        whole = micro_batch.head_degree == 1
        return cls.of_shards(
            micro_batch,
            ring,
            index,
            [ring_shard(sequence, len(ring), index) for sequence in micro_batch.ring_sequences],
            peer_ring_tokens=_ring_tokens(micro_batch.ring_sequences, len(ring)),
            steps=_ring_steps(micro_batch.ring_sequences, len(ring), index) if whole else (),
            multiple_of=multiple_of,
            head_degree=micro_batch.head_degree,
        )

    @classmethod
    def of_shards(
        cls,
        micro_batch: MicroBatch,
        ring: tuple[int, ...],
        index: int,
        shards: Seq[Seq[Piece]],
        *,
        peer_ring_tokens: tuple[int, ...],
        steps: tuple[RingStep, ...],
        multiple_of: int,
        head_degree: int = 1,
    ) -> MicroBatchLayout:
        """A layout whose ring shards were cut by whoever runs the ring.

        Args:
            ring: HDP ranks; empty without one.
            shards: this member's pieces of each ring sequence.
        """
        local = [[(s.id, 0, s.length)] for s in micro_batch.local_sequences]
        parts = [*shards, *local]
        pieces = [piece for part in parts for piece in part]
        lengths = [_tokens(part) for part in parts]
        real = sum(lengths)
        padding = -real % multiple_of if real else multiple_of
        positions = [np.arange(start, stop) for _, start, stop in pieces] + [np.arange(padding)]
        own = [length for length in (*lengths, padding) if length]
        return cls(
            ring=ring or None,
            index=index,
            pieces=tuple(pieces),
            positions=np.concatenate(positions).astype(np.int64),
            num_tokens=real + padding,
            ring_tokens=sum(lengths[: len(shards)]),
            padding=padding,
            sequence_lengths=tuple(
                sequence.length
                for sequence in (*micro_batch.ring_sequences, *micro_batch.local_sequences)
            ),
            rows_per_sequence=tuple(lengths),
            num_ring_sequences=len(shards),
            peer_ring_tokens=peer_ring_tokens,
            own=call_boundaries(own, own),
            steps=steps,
            head_degree=head_degree,
        )


def _chunks(sequence: Sequence, ring_size: int, index: int) -> tuple[Piece, Piece]:
    """Chunks `index` and its mirror; either may be empty."""
    cuts = cut_points(sequence.length, ring_size)
    mirror = 2 * ring_size - 1 - index
    return (
        (sequence.id, cuts[index], cuts[index + 1]),
        (sequence.id, cuts[mirror], cuts[mirror + 1]),
    )


def ring_shard(sequence: Sequence, ring_size: int, index: int) -> list[Piece]:
    """The pieces of a sequence that a ring's member holds; none of them is empty."""
    return [piece for piece in _chunks(sequence, ring_size, index) if piece[2] > piece[1]]


def _tokens(pieces: Seq[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def _ring_tokens(sequences: Seq[Sequence], ring_size: int) -> tuple[int, ...]:
    return tuple(
        sum(_tokens(ring_shard(sequence, ring_size, index)) for sequence in sequences)
        for index in range(ring_size)
    )


def _ring_steps(sequences: Seq[Sequence], ring_size: int, index: int) -> tuple[RingStep, ...]:
    return tuple(
        _ring_step(sequences, ring_size, index, (index - step) % ring_size)
        for step in range(1, ring_size)
    )


def _ring_step(sequences: Seq[Sequence], ring_size: int, index: int, source: int) -> RingStep:
    """An earlier source: all my rows see its first chunk. A later one: my second sees all of it.

    The other pairs of chunks are in the causal future.
    """
    earlier = source < index
    q_rows, k_rows, q_lengths, k_lengths = [], [], [], []
    q_at = k_at = 0
    for sequence in sequences:
        q_first, q_second = (_tokens([p]) for p in _chunks(sequence, ring_size, index))
        k_first, k_second = (_tokens([p]) for p in _chunks(sequence, ring_size, source))
        q_begin = q_at if earlier else q_at + q_first
        k_end = k_at + k_first if earlier else k_at + k_first + k_second
        q_at, q_end = q_at + q_first + q_second, q_at + q_first + q_second
        if q_end > q_begin and k_end > k_at:
            q_rows.append((q_begin, q_end))
            k_rows.append((k_at, k_end))
            q_lengths.append(q_end - q_begin)
            k_lengths.append(k_end - k_at)
        k_at += k_first + k_second
    if not q_rows:
        return RingStep(source, None)
    return RingStep(
        source,
        BlockCall(joined_rows(q_rows), joined_rows(k_rows), call_boundaries(q_lengths, k_lengths)),
    )


def joined_rows(ranges: list[tuple[int, int]]) -> Rows:
    """Ranges of rows, in order, as one index."""
    if all(end == begin for (_, end), (begin, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return np.concatenate([np.arange(begin, end) for begin, end in ranges])


def call_boundaries(
    q_lengths: Seq[int], k_lengths: Seq[int], window: int | None = None
) -> Boundaries:
    """One call over sequences of these lengths."""
    return Boundaries(
        np.concatenate(([0], np.cumsum(q_lengths))).astype(np.int32),
        np.concatenate(([0], np.cumsum(k_lengths))).astype(np.int32),
        max(q_lengths),
        max(k_lengths),
        window,
    )
