# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokens of one range of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Piece(NamedTuple):
    """Tokens, labels and loss mask, all [n]: int64 and float32, or int32 where they travel."""

    tokens: NDArray[np.integer]
    labels: NDArray[np.integer]
    loss_mask: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece of all, in order, as small as it travels (int32)."""
    return Piece(
        np.concatenate([piece.tokens for piece in pieces]).astype(np.int32),
        np.concatenate([piece.labels for piece in pieces]).astype(np.int32),
        np.concatenate([piece.loss_mask for piece in pieces]),
    )


def cut(piece: Piece, sizes: Sequence[int]) -> list[Piece]:
    """The opposite of `join`: views of `sizes` tokens each."""
    ends = np.cumsum(sizes)
    return [
        Piece(*(part[end - size : end] for part in piece))  # type: ignore[arg-type]
        for size, end in zip(sizes, ends, strict=True)
    ]
