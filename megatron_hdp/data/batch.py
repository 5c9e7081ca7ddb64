# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One rank's micro-batch as the dictionary that Megatron scripts read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hdp.data.piece import Piece

Batch = dict[str, torch.Tensor | None]


def fill_batch(pieces: Iterable[Piece], positions: NDArray[np.int64]) -> Batch:
    """Lays pieces one behind the other.

    Args:
        pieces: in the rank's token order.
        positions: [T] position of every token in its sequence; tokens past the pieces are padding.

    Returns:
        tokens, labels, position_ids (int64 [1, T]) and loss_mask (float32 [1, T]) on the CPU, and
        attention_mask None. Labels were shifted before the cut, so a boundary loses no target.
    """
    total = len(positions)
    tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    loss_mask = np.zeros(total, np.float32)
    at = 0
    for piece in pieces:
        end = at + len(piece.tokens)
        tokens[at:end], labels[at:end], loss_mask[at:end] = piece
        at = end
    return {
        "tokens": torch.from_numpy(tokens)[None],
        "labels": torch.from_numpy(labels)[None],
        "loss_mask": torch.from_numpy(loss_mask)[None],
        "position_ids": torch.from_numpy(np.array(positions, np.int64))[None],
        "attention_mask": None,
    }
