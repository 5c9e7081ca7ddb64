# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which packs a step takes, and what the planner is asked for it. No token, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.planning.config import StepRequest

SEQUENCES_PER_PACK = 1 << 24
"""Sequence ids are pack * 2^24 + position in the pack: unique in a step, and they tell the pack."""


@dataclass(frozen=True)
class Steps:
    """The steps of one stream. Packs are numbered through all of them."""

    name: str
    """train, valid or test."""
    packs_per_step: int
    num_packs: int

    def has(self, step: int) -> bool:
        return (step + 1) * self.packs_per_step <= self.num_packs

    def first_pack(self, step: int) -> int:
        """The step's packs are this one and the `packs_per_step` - 1 after it.

        Raises:
            CorpusError: there are fewer packs.
        """
        if not self.has(step):
            raise CorpusError(
                f"step {step} of {self.name} needs packs up to "
                f"{(step + 1) * self.packs_per_step}, but there are {self.num_packs}: lower "
                f"--train-iters or --eval-iters."
            )
        return step * self.packs_per_step

    def request(self, step: int, lengths: Sequence[NDArray[np.int64]]) -> StepRequest:
        """What to ask a planner.

        Args:
            lengths: per pack of the step, tokens of its sequences in order.
        """
        first = self.first_pack(step)
        counts = np.array([len(part) for part in lengths], np.int64)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        pack_of = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
        position = np.arange(offsets[-1], dtype=np.int64) - offsets[:-1][pack_of]
        ids = (first + pack_of) * SEQUENCES_PER_PACK + position
        return StepRequest(ids, np.concatenate(lengths), offsets, step)


class StepRequests:
    """Requests of a stream whose lengths are known here.

    Args:
        lengths: [n] tokens of a pack's sequences, by pack.
    """

    def __init__(self, steps: Steps, lengths: Callable[[int], NDArray[np.int64]]) -> None:
        self.steps = steps
        self.has = steps.has
        self._lengths = lengths

    def __call__(self, step: int) -> StepRequest:
        first = self.steps.first_pack(step)
        packs = range(first, first + self.steps.packs_per_step)
        return self.steps.request(step, [self._lengths(pack) for pack in packs])
