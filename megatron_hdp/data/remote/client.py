# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The client: in a training rank, fetches that rank's plan and slices ahead of its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hdp.data.batch import fill_batch
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.loading.loader import Loaded, Loader, Share
from megatron_hdp.data.loading.prefetch import Prefetch
from megatron_hdp.data.piece import Piece, cut
from megatron_hdp.data.remote.asking import Actors, Answer
from megatron_hdp.data.remote.cluster import Cluster
from megatron_hdp.data.requests import Steps
from megatron_hdp.data.sources import PackSource
from megatron_hdp.planning.values import Plan

logger = logging.getLogger(__name__)


class _Fetched(NamedTuple):
    plan: Plan
    loaded: Loaded


class RayLoader(Loader):
    """One stream of one rank.

    Args:
        cluster: where scheduler and servers are.
        steps: the stream's.
        source: the stream's; only its state is asked for here.
        shares_of: this rank's parts of a plan.
        number: this rank's in the domain, which spreads the ranks over the servers.
        rank: this rank's in the world: its name in the log, and rank 0 tells what the roles say.
        depth: steps fetched ahead of the one that is asked for; no more are held.
        timeout_s: how long any answer may take.
    """

    def __init__(
        self,
        cluster: Cluster,
        steps: Steps,
        source: PackSource,
        *,
        shares_of: Callable[[Plan], Sequence[Share]],
        number: int,
        rank: int,
        depth: int,
        timeout_s: float,
    ) -> None:
        super().__init__(source, steps)
        self._shares_of, self._number, self._timeout_s = shares_of, number, timeout_s
        name = f"hdp loader {steps.name}"
        self._prefetch = Prefetch(name, self._fetch, steps.has, depth)
        asker = f"rank {rank}"
        self._servers = Actors(cluster.servers, "server", asker, timeout_s)
        self._scheduler = Actors([cluster.scheduler], "scheduler", asker, timeout_s)
        self._told = cluster.told if rank == 0 else None
        cluster.at_close(self.close)

    def plan(self, step: int) -> Plan:
        return self._get(step).plan

    def read(self, step: int, shares: Sequence[Share]) -> Loaded:
        return self._get(step).loaded

    def close(self) -> None:
        self._prefetch.close()
        self._source.close()

    def _get(self, step: int) -> _Fetched:
        # Scheduler, plan and servers, each within its own timeout that says more.
        return self._prefetch.get(step, 4 * self._timeout_s)

    def _fetch(self, step: int) -> _Fetched:
        self._steps.first_pack(step)
        plan, retries = self._fetch_plan(step)
        begun = time.perf_counter()
        shares = self._shares_of(plan)
        pieces = [piece for share in shares for piece in share.pieces]
        answer = self._read(step, pieces)
        sizes = [sum(stop - start for _, start, stop in share.pieces) for share in shares]
        if len(answer.value.tokens) != sum(sizes):
            raise CorpusError(
                f"servers sent {len(answer.value.tokens)} tokens of step {step} of "
                f"{self._steps.name} where {sum(sizes)} were asked for."
            )
        batches = tuple(
            fill_batch([part], share.positions)
            for part, share in zip(cut(answer.value, sizes), shares, strict=True)
        )
        loaded = Loaded(
            batches,
            tokens=sum(sizes),
            bytes=answer.value.nbytes,
            begin_s=begun,
            end_s=time.perf_counter(),
            retries=retries + answer.retries,
        )
        return _Fetched(plan, loaded)

    def _fetch_plan(self, step: int) -> tuple[Plan, int]:
        """A plan is lost when its scheduler dies between telling of it and sending it."""
        import ray

        deadline, retries = time.monotonic() + self._timeout_s, 0
        while True:
            planned, more = self._scheduler.ask(
                lambda scheduler: scheduler.plan.remote(self._steps.name, step),
                f"plan step {step} of {self._steps.name}",
            )
            self._tell(planned.notices)
            try:
                left = max(1.0, deadline - time.monotonic())
                return ray.get(planned.plan[0], timeout=left), retries + more
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError(
                    f"HDP waited {self._timeout_s:.0f} s for the plan of step {step} of "
                    f"{self._steps.name} to come from the scheduler's node."
                ) from None
            except ray.exceptions.RayError:
                if time.monotonic() > deadline:
                    raise
                retries += more + 1

    def _read(self, step: int, pieces: list[tuple[int, int, int]]) -> Answer:
        if not pieces:  # all this rank's micro-batches are padding
            none = np.zeros(0, np.int32)
            return Answer(Piece(none, none, none.astype(np.float32)), 0)
        return self._servers.ask(
            lambda server: server.read.remote(self._steps.name, pieces),
            f"read step {step} of {self._steps.name}",
            first=self._number % len(self._servers.handles),
        )

    def _tell(self, notices: Sequence[str]) -> None:
        """What servers and scheduler had to say, once, on one rank."""
        if self._told is not None:
            for notice in notices:
                if notice not in self._told:
                    self._told.add(notice)
                    logger.warning("%s", notice)
