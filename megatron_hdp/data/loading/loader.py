# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a rank's data iterator asks of a loader; there are two, `local` and `ray`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.batch import Batch
from megatron_hdp.data.requests import Steps
from megatron_hdp.data.sources import PackSource
from megatron_hdp.planning.values import Plan


class Share(Protocol):
    """This rank's part of one micro-batch."""

    @property
    def pieces(self) -> Sequence[tuple[int, int, int]]:
        """(sequence id, first token, one past the last), in the rank's token order."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T] as in `fill_batch`."""


@dataclass(frozen=True)
class Loaded:
    """One step's batches of this rank, and what it took to get them."""

    batches: tuple[Batch, ...]
    tokens: int
    """Tokens that came to this rank; padding is none."""
    bytes: int
    """Of their tokens, labels and masks as they came."""
    begin_s: float
    """When the plan was there and its tokens were asked for; on `time.perf_counter`'s clock."""
    end_s: float
    """When they had come."""
    retries: int = 0
    """Times that another server was asked, because one had died, failed or was slow."""

    @property
    def seconds(self) -> float:
        """From asking to having them, mostly behind training."""
        return self.end_s - self.begin_s

    def seconds_within(self, begin_s: float, end_s: float) -> float:
        """How much of loading fell into a time; on the same clock."""
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class Loader(ABC):
    """Plans and tokens of one stream. Steps are asked for in order, `plan` before `read`."""

    def __init__(self, source: PackSource, steps: Steps) -> None:
        self._source, self._steps = source, steps
        self.fingerprint = source.fingerprint
        """Tells corpora apart across ranks."""

    def has(self, step: int) -> bool:
        """Whether the corpus has packs for the step."""
        return self._steps.has(step)

    def state(self, step: int) -> dict[str, Any] | None:
        """What the source needs to go on at a step; None: nothing."""
        return self._source.state(step * self._steps.packs_per_step)

    @abstractmethod
    def plan(self, step: int) -> Plan:
        """The step's plan, the same on every rank.

        Raises:
            PlanError, CorpusError: the step cannot be planned, or does not exist.
            TimeoutError, RuntimeError: whoever plans did not answer, or ended.
        """

    @abstractmethod
    def read(self, step: int, shares: Sequence[Share]) -> Loaded:
        """This rank's tokens, nothing else.

        Raises:
            CorpusError: a file cannot be read.
            TimeoutError: no server answered.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what works for this loader. Idempotent."""
