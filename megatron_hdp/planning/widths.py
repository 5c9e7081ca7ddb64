# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The ring widths that `auto` considers under pipeline stages, and each sequence's cost on them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.config import PlannerConfig
from megatron_hdp.planning.cost import CostModel, FloatArray

Ints = NDArray[np.int64]

_NODE_PART = 8
"""Ranks that a wide ring is a multiple of, in nodes of that size or larger: few distinct rings."""
_STEPS_PER_OCTAVE = 8


def ring_widths(num_ranks: int, ranks_per_node: int) -> Ints:
    """Widths in rising order, 1 and N among them.

    Inside a node 1, 2, 3, 4, 6; then multiples of a node (of eight ranks in larger ones), about
    eight per doubling. N = 100: 1 2 3 4 6 8 16 24 32 40 48 56 64 72 80 88 96 100.
    """
    unit = min(_NODE_PART, ranks_per_node)
    found = {width for width in (1, 2, 3, 4, 6) if width < unit}
    width = unit
    while width < num_ranks:
        found.add(width)
        octave = (width // unit // _STEPS_PER_OCTAVE).bit_length()
        width += unit << max(0, octave - 1)
    return np.array(sorted({w for w in found if w < num_ranks} | {1, num_ranks}))


class WidthTable:
    """Times of one step's sequences on rings of every width.

    Args:
        lengths: [S] tokens, in falling order.
    """

    def __init__(self, config: PlannerConfig, cost: CostModel, lengths: Ints) -> None:
        self.lengths = lengths
        self.num_ranks, self.capacity, self.room = config.num_ranks, config.capacity, config.room
        self.widths = ring_widths(config.num_ranks, cost.ranks_per_node)
        needs = np.minimum(-(-lengths // config.room), config.num_ranks)
        self.narrowest = np.searchsorted(self.widths, needs)
        """[S] the smallest width that holds a sequence, as an index of `widths`."""
        self.times: FloatArray = np.stack(
            [cost.sequence_s(lengths, np.full(len(lengths), width)) for width in self.widths]
        )
        """[widths, S] seconds."""
        self.areas: FloatArray = self.times * self.widths[:, None]
        """[widths, S] rank-seconds."""
        self._least = self.areas[self.narrowest, np.arange(len(lengths))]

    def allowed_times(self, growth: float) -> FloatArray:
        """[widths, S] seconds on rings that hold a sequence at most `growth` above its least area.

        Infinite on others, and on one rank.
        """
        wide_enough = np.arange(len(self.widths))[:, None] >= np.maximum(self.narrowest, 1)
        return np.where(
            wide_enough & (self.areas <= (1 + growth) * self._least), self.times, np.inf
        )

    def shard(self, sequence: int, width: int) -> int:
        """Most tokens that a member holds; a sequence that fits with offload only fills it."""
        return min(self.room, 2 * -(-int(self.lengths[sequence]) // (2 * width)))
