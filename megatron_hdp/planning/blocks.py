# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Nested blocks of ranks, in which `auto` places its rings.

Every ring is one block, and blocks of two levels are nested or apart. So all members of a ring have
the same history, none waits, blocks up to a node's width stay in a node, and a rank has few peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Level:
    """One partition of the ranks into blocks."""

    starts: NDArray[np.int64]
    widths: NDArray[np.int64]
    parents: NDArray[np.int64]
    """Index of each block's parent in the level above; -1 at the root."""

    @property
    def widest(self) -> int:
        return int(self.widths.max())


Shape = Literal["powers", "three-quarters"]


def block_tree(num_ranks: int, shape: Shape = "powers") -> list[Level]:
    """From all ranks down to single ones.

    Args:
        shape: "powers": a level splits what is wider than a power of two, so blocks up to a node's
            width stay in a node: 100 | 64 36 | 32 32 32 4 | 16 x6 4 | 8 x12 4 | 4 x25 | 2 x50 | 1.
            "three-quarters": levels of 3/4 widths too, down to an eighth of the ranks.
    """
    levels = [Level(np.array([0]), np.array([num_ranks]), np.array([-1]))]
    widths = {1 << k for k in range(num_ranks.bit_length() + 1)}
    if shape == "three-quarters":
        widths |= {3 * width for width in widths if 3 * width >= num_ranks // 8}
    for width in sorted(widths, reverse=True):
        if width < levels[-1].widest:
            levels.append(_split(levels[-1], width))
    return levels


def _split(above: Level, width: int) -> Level:
    """Cuts each block of `above` into blocks of `width` ranks and a rest."""
    starts, widths, parents = [], [], []
    rows = zip(above.starts.tolist(), above.widths.tolist(), strict=True)
    for parent, (start, size) in enumerate(rows):
        for offset in range(0, size, width):
            starts.append(start + offset)
            widths.append(min(width, size - offset))
            parents.append(parent)
    return Level(np.array(starts), np.array(widths), np.array(parents))
