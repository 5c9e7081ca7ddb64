# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How Transformer Engine cuts packed sequences over a context-parallel group. Only NumPy.

It wants every sequence padded to a multiple of 2P, and cuts it in 2P equal chunks; the group's i-th
rank, in ascending rank order, holds chunks i and 2P-1-i of each (DualChunkSwap,
`get_batch_on_this_cp_rank` of transformer_engine 2.20). The model runs on the real tokens only;
they are spread over the padded rows for the attention call, and gathered behind it. Padding stands
at a sequence's end, so that no real token sees it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import MicroBatch, Sequence
from megatron_hdp.runtime.sharding import MicroBatchLayout, Piece


def te_cut_points(length: int, ring_size: int) -> list[int]:
    """Boundaries of the chunks' real tokens: min(i * ceil(length / 2P), length), i = 0 .. 2P."""
    chunk = _chunk(length, ring_size)
    return [min(i * chunk, length) for i in range(2 * ring_size + 1)]


def te_layout(micro_batch: MicroBatch, rank: int, *, multiple_of: int = 1) -> MicroBatchLayout:
    """`MicroBatchLayout.build` with Transformer Engine's cuts and its order of a ring's ranks.

    A member may hold no token of its ring; it then has a masked one. There are no ring steps: they
    are Transformer Engine's.
    """
    # torch.distributed sorts a group's ranks, so a group cannot have a ring's own order.
    ring = tuple(sorted(micro_batch.ring.ranks)) if micro_batch.ring is not None else ()
    index = ring.index(rank) if ring else 0
    sequences = micro_batch.ring_sequences
    return MicroBatchLayout.of_shards(
        micro_batch,
        ring,
        index,
        [te_shard(sequence, len(ring), index) for sequence in sequences],
        peer_ring_tokens=tuple(
            sum(stop - start for s in sequences for _, start, stop in te_shard(s, len(ring), i))
            for i in range(len(ring))
        ),
        steps=(),
        multiple_of=multiple_of,
    )


def te_shard(sequence: Sequence, ring_size: int, index: int) -> list[Piece]:
    """Real tokens of a sequence that the group's rank `index` holds."""
    cuts = te_cut_points(sequence.length, ring_size)
    return [
        (sequence.id, cuts[part], cuts[part + 1])
        for part in (index, 2 * ring_size - 1 - index)
        if cuts[part + 1] > cuts[part]
    ]


@dataclass(frozen=True)
class PaddedCall:
    """One attention call on packed sequences."""

    cu_seqlens: NDArray[np.int32]
    """[n+1] cumulative padded lengths of whole sequences, not of this rank's shards."""
    max_seqlen: int
    """Longest padded length."""
    num_rows: int
    """Rows that this rank passes."""
    rows: NDArray[np.int64] | None
    """Row of each of this rank's tokens; None when all rows are tokens, in order."""


def ring_call(layout: MicroBatchLayout, sequences: Seq[Sequence]) -> PaddedCall | None:
    """The call over the ring's shards, which all members make together; None without a ring.

    Args:
        layout: from `te_layout`.
        sequences: the micro-batch's ring sequences.
    """
    if layout.ring is None:
        return None
    size, index = len(layout.ring), layout.index
    rows, at = [], 0
    for sequence in sequences:
        chunk, cuts = _chunk(sequence.length, size), te_cut_points(sequence.length, size)
        for part in (index, 2 * size - 1 - index):
            rows.append(at + np.arange(cuts[part + 1] - cuts[part]))
            at += chunk
    padded = [2 * size * _chunk(sequence.length, size) for sequence in sequences]
    return _call(padded, at, np.concatenate(rows))


def local_call(layout: MicroBatchLayout, sequences: Seq[Sequence]) -> PaddedCall | None:
    """The call over local sequences, and the masked tokens behind them; None without any."""
    lengths = [sequence.length for sequence in sequences]
    lengths += [layout.padding] if layout.padding else []
    if not lengths:
        return None
    return _call(lengths, sum(lengths), None)


def _chunk(length: int, ring_size: int) -> int:
    return -(-length // (2 * ring_size))


def _call(lengths: Seq[int], num_rows: int, rows: NDArray[np.int64] | None) -> PaddedCall:
    return PaddedCall(
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        max_seqlen=max(lengths),
        num_rows=num_rows,
        rows=None if rows is None or len(rows) == num_rows else rows,
    )
