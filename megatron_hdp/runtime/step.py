# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The data iterator with the balance scheduler in it.

A thread prepares the next step while this one trains: it takes the plan (made in another process),
has the loader read this rank's own tokens, and compares the plan's digest over all ranks.
`begin_step()` hands it over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_hdp.data.batch import Batch
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.loading.loader import Loaded, Loader
from megatron_hdp.planning.ahead import PlanningEnded
from megatron_hdp.planning.values import MicroBatch, Plan, PlanDigest, PlanError
from megatron_hdp.runtime.agreement import Agreement
from megatron_hdp.runtime.context import current_micro_batch
from megatron_hdp.runtime.preparation import Preparation
from megatron_hdp.runtime.sharding import MicroBatchLayout


@dataclass(frozen=True)
class PreparedStep:
    """One step, ready to run on this rank: CPU tensors only."""

    step: int
    plan: Plan
    micro_batches: tuple[MicroBatch, ...]
    layouts: tuple[MicroBatchLayout, ...]
    loaded: Loaded
    digest: PlanDigest


class Waited(NamedTuple):
    """Seconds that a step waited, by what for."""

    planning_s: float
    """Its plan: made, compared over all ranks, cut for this one."""
    loading_s: float
    """This rank's tokens."""

    @classmethod
    def split(cls, begin_s: float, end_s: float, loaded: Loaded) -> Waited:
        """A wait on `time.perf_counter`'s clock: what fell into loading is loading."""
        loading_s = loaded.seconds_within(begin_s, end_s)
        return cls(end_s - begin_s - loading_s, loading_s)


class LayoutBuilder(Protocol):
    """Gives one rank's layout of a micro-batch; all ranks must use the same."""

    def __call__(
        self, micro_batch: MicroBatch, rank: int, *, multiple_of: int
    ) -> MicroBatchLayout: ...


@dataclass(frozen=True)
class StreamConfig:
    """What one stream (train, valid or test) needs to know."""

    name: str
    first_step: int
    rank: int
    """This process's HDP rank."""
    multiple_of: int
    """Tokens of a micro-batch are padded to a multiple of this (TP under sequence parallel)."""
    timeout_s: float
    config_text: str
    """Options that all ranks must share; part of the digest."""
    layout: LayoutBuilder = MicroBatchLayout.build
    """How a ring's sequences are cut."""

    def layouts(self, micro_batches: Iterable[MicroBatch]) -> tuple[MicroBatchLayout, ...]:
        """What this rank holds of its micro-batches."""
        return tuple(
            self.layout(micro_batch, self.rank, multiple_of=self.multiple_of)
            for micro_batch in micro_batches
        )


class HdpDataIterator:
    """What `build_train_valid_test_data_iterators` returns, inside Megatron's RerunDataIterator.

    `begin_step()` (called by the schedule's wrapper) moves to the next step; `__next__` gives the
    batch of the micro-batch whose forward step runs, so it does not matter on which pipeline stages
    a script pulls from it, or how often.
    """

    def __init__(
        self,
        loader: Loader,
        agreement: Agreement,
        config: StreamConfig,
    ) -> None:
        self.config = config
        self._loader = loader
        self._agreement = agreement
        self._next_step = config.first_step
        self._pending: Preparation[PreparedStep] | None = None
        self.current: PreparedStep | None = None
        self.waited = Waited(0.0, 0.0)

    def begin_step(self) -> PreparedStep:
        """The next step; then the one after it is prepared behind the caller's back.

        Raises:
            PlanDisagreement, RankFailed, CorpusError, RuntimeError: what preparing the step raised.
            TimeoutError: planning or reading took longer than the timeout.
        """
        begun = time.perf_counter()
        pending = self._pending or self._submit(self._next_step)
        self._pending = None
        self.current = pending.result(self.config.timeout_s)
        self.waited = Waited.split(begun, time.perf_counter(), self.current.loaded)
        self._next_step += 1
        if self._loader.has(self._next_step):
            self._pending = self._submit(self._next_step)
        return self.current

    def prefetch(self) -> None:
        """Begins to prepare the first step, behind whatever else a program does before it."""
        if self._pending is None and self._loader.has(self._next_step):
            self._pending = self._submit(self._next_step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        running = current_micro_batch()
        if running is None:
            raise RuntimeError(
                "HDP's data iterator was read outside a forward step: let Megatron's schedule, "
                "with megatron_hdp.enable() in force, call your forward_step."
            )
        return dict(running.batch)

    def save_state(self) -> dict[str, Any] | None:
        """What the source needs to go on at the next step (Megatron's external loaders' method)."""
        return self._loader.state(self._next_step)

    def close(self) -> None:
        """Ends what plans and reads for it. Idempotent."""
        self._loader.close()

    def _submit(self, step: int) -> Preparation[PreparedStep]:
        return Preparation(f"step {step} of {self.config.name}", lambda p: self._prepare(step, p))

    def _prepare(self, step: int, preparation: Preparation[PreparedStep]) -> PreparedStep:
        """Compared last, so that a rank which cannot go on tells the others why."""
        try:
            prepared = self._load(step, preparation)
        except Exception as error:
            preparation.at("reported to the other ranks as failed")
            with suppress(RuntimeError):  # this rank knows its own fault better
                self._agreement.fail(step, _said(error))
            raise
        preparation.at("compared with the other ranks")
        self._agreement.check(step, prepared.digest)
        return prepared

    def _load(self, step: int, preparation: Preparation[PreparedStep]) -> PreparedStep:
        preparation.at("planned")
        plan = self._loader.plan(step)
        digest = plan.digest(corpus=self._loader.fingerprint, config=self.config.config_text)
        preparation.at("read")
        micro_batches = tuple(plan.micro_batches(self.config.rank))
        layouts = self.config.layouts(micro_batches)
        loaded = self._loader.read(step, layouts)
        return PreparedStep(step, plan, micro_batches, layouts, loaded, digest)


def _said(error: Exception) -> str:
    """Our errors are sentences; of others the type says more than the text."""
    if isinstance(error, CorpusError | PlanError | PlanningEnded | TimeoutError):
        return str(error)
    return f"{type(error).__name__}: {error}"
