# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which width of block each sequence may take, what it costs there, and the choice by time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.blocks import Shape, block_tree
from megatron_hdp.planning.config import PlannerConfig
from megatron_hdp.planning.cost import CostModel

Ints = NDArray[np.int64]


class RingChoices:
    """Times of one step's sequences on every level of a block tree.

    Args:
        lengths: [S] tokens, in falling order.
    """

    def __init__(
        self, config: PlannerConfig, cost: CostModel, lengths: Ints, shape: Shape = "powers"
    ) -> None:
        self.lengths = lengths
        self.levels = block_tree(config.num_ranks, shape)
        self.needs = np.minimum(-(-lengths // config.room), config.num_ranks)
        """[S] D(s), the fewest ranks; all of them for a sequence that fits with offload only."""
        widest = np.array([level.widest for level in self.levels])
        # Deepest level whose widest block is wide enough; levels get narrower with their number.
        self.first_level = len(widest) - np.searchsorted(widest[::-1], self.needs) - 1
        self.times = np.stack(
            [cost.sequence_s(lengths, np.full(len(lengths), width)) for width in widest]
        )
        """[levels, S] seconds on a level's widest block."""
        self.areas = self.times * widest[:, None]
        """[levels, S] rank-seconds there."""

    @property
    def bottom(self) -> int:
        """The level of single ranks: local sequences."""
        return len(self.levels) - 1

    def choose(self, limit_s: float, growth: float) -> Ints:
        """[S] level of each sequence: the smallest ring, raised while it is over `limit_s`.

        A wider ring must be faster, and cost at most `growth` more rank-time than the smallest.
        """
        level_of = self.first_level.copy()
        least = self.areas[level_of, np.arange(len(level_of))]
        for number in range(self.bottom, 0, -1):
            here, above = self.times[number], self.times[number - 1]
            cheap = self.areas[number - 1] <= (1 + growth) * least
            raised = (level_of == number) & (here > limit_s) & (above < here) & cheap
            level_of[raised] = number - 1
        return level_of

    def chosen_times(self, level_of: Ints) -> NDArray[np.float64]:
        """[S] seconds at the chosen levels."""
        return self.times[level_of, np.arange(len(level_of))]
