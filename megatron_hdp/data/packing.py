# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Order and packs of an epoch: pure functions of (lengths, seed, epoch). No token is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """[num_documents] a permutation that depends on (seed, epoch) alone.

    The legacy generator is used on purpose: its streams are frozen, so an order stays what it was
    across NumPy versions and a resumed run sees the same one.
    """
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    return state.permutation(num_documents).astype(np.int64)


def pack_starts(lengths: NDArray[np.int64], context_length: int) -> NDArray[np.int64]:
    """Greedy packs of whole sequences, in order, of at most `context_length` tokens each.

    Args:
        lengths: [n] tokens, each in 1 .. context_length.

    Returns:
        [P+1] offsets: pack p holds sequences starts[p] .. starts[p+1]-1; the last entry is n.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, at, done = [0], 0, 0
    while at < len(lengths):
        at = int(np.searchsorted(ends, done + context_length, side="right"))
        done = int(ends[at - 1])
        starts.append(at)
    return np.asarray(starts, np.int64)


def build_epochs(
    lengths: NDArray[np.int64], context_length: int, seed: int, num_packs: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whole epochs until there are `num_packs` packs, even if all were full (one when None).

    A pack never crosses an epoch, so pack k is the same whatever number of packs is asked for.

    Args:
        lengths: [n] tokens of the split's documents, each in 1 .. context_length.

    Returns:
        order [E*n]: document positions (0 .. n-1) in reading order;
        starts [P+1]: pack p is order[starts[p] : starts[p+1]].
    """
    orders, all_starts, offset, epoch = [], [np.zeros(1, np.int64)], 0, 0
    while True:
        order = epoch_order(len(lengths), seed, epoch)
        starts = pack_starts(lengths[order], context_length)
        orders.append(order)
        all_starts.append(starts[1:] + offset)
        offset += len(order)
        epoch += 1
        if num_packs is None or epoch * int(lengths.sum()) >= num_packs * context_length:
            return np.concatenate(orders), np.concatenate(all_starts)
