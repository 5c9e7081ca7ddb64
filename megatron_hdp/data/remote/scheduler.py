# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The scheduler: collects lengths, plans, and hands every rank the same plan.

It remembers only what it can compute again, so that a new one goes on where a dead one stood.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil

from megatron_hdp.data.remote.asking import Actors
from megatron_hdp.data.remote.notices import Notices
from megatron_hdp.data.remote.server import RoleStatus, own_memory_bytes
from megatron_hdp.data.requests import Steps
from megatron_hdp.planning import PlannerConfig, plan_step, predict_step


class Stream(NamedTuple):
    """What the scheduler knows of train, valid or test."""

    steps: Steps
    config: PlannerConfig


class Planned(NamedTuple):
    """What a rank gets for a step."""

    plan: list[Any]
    """[a reference to the Plan], one object for all ranks of a node."""
    notices: list[str]
    """What the log of the run should have, of servers and scheduler."""


class Scheduler:
    """One process for all ranks and streams; an async actor, so that ranks wait side by side.

    Args:
        streams: by name.
        servers: handles of the servers.
        ahead: steps planned beyond the newest that was asked for.
        timeout_s: how long lengths may take.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream],
        servers: Sequence[Any],
        ahead: int,
        timeout_s: float,
    ) -> None:
        self._streams, self._ahead = streams, ahead
        self._notices = Notices()
        self._servers = Actors(servers, "server", "scheduler", timeout_s)
        self._plans: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._newest = dict.fromkeys(streams, 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hdp plan")
        self._calls = self._tokens = 0

    async def plan(self, stream: str, step: int) -> Planned:
        """The step's plan, made when it is not yet.

        Raises:
            PlanError, CorpusError: the step cannot be planned, or does not exist.
            TimeoutError: no server told the lengths.
        """
        self._calls += 1
        has = self._streams[stream].steps.has
        for wanted in range(step, step + self._ahead + 1):
            if wanted == step or has(wanted):
                self._begin(stream, wanted)
        self._forget(stream, step)
        plan = await asyncio.shield(self._plans[stream, step])
        return Planned(plan, self._notices.all())

    def _begin(self, stream: str, step: int) -> None:
        known = self._plans.get((stream, step))
        if known is not None and not (known.done() and known.exception()):
            return
        loop = asyncio.get_running_loop()
        self._plans[stream, step] = loop.run_in_executor(self._thread, self._make, stream, step)

    def _forget(self, stream: str, step: int) -> None:
        """Ranks are less than `ahead` + 2 steps apart, and a plan can be made again."""
        self._newest[stream] = max(step, self._newest[stream])
        oldest = self._newest[stream] - self._ahead - 2
        for known in [key for key in self._plans if key[0] == stream and key[1] < oldest]:
            if known != (stream, step):
                del self._plans[known]

    def _make(self, stream: str, step: int) -> list[Any]:
        import ray

        steps, config = self._streams[stream]
        first, count = steps.first_pack(step), steps.packs_per_step
        lengths, notices = self._servers.ask(
            lambda server: server.lengths.remote(stream, first, count),
            f"tell the lengths of step {step} of {stream}",
            first=step % len(self._servers.handles),
        ).value
        self._notices.add(notices)
        plan = predict_step(config, plan_step(config, steps.request(step, lengths)))
        self._tokens += plan.num_tokens
        return [ray.put(plan)]

    async def status(self) -> RoleStatus:
        """What this process is and has done."""
        process = psutil.Process()
        times = process.cpu_times()
        return RoleStatus(
            "scheduler", os.uname().nodename, process.pid, own_memory_bytes(),
            times.user + times.system, self._calls, self._tokens,
        )  # fmt: skip
