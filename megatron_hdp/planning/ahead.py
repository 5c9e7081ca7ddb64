# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Plans of coming steps from a process of their own, so that no step waits for its plan."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megatron_hdp.planning.child_process import kill_and_wait, signals_blocked
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.values import Plan, PlanError


class PlanningEnded(RuntimeError):
    """The planning process ended by itself or was killed."""


class PlanAhead:
    """Keeps `depth` steps planned beyond the one that is asked for.

    Args:
        config: what to plan with; sent to the process once.
        request: lengths of step k; called in the asking thread, in step order.
        has: whether step k exists; nothing is planned past the last one.
        depth: steps ahead, at least 1.
        timeout_s: how long `get` waits for a plan.
    """

    def __init__(
        self,
        config: PlannerConfig,
        request: Callable[[int], StepRequest],
        has: Callable[[int], bool],
        depth: int,
        timeout_s: float,
    ) -> None:
        self._config = config
        self._request = request
        self._has = has
        self._depth = depth
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: queue.Queue[object] = queue.Queue()
        self._inbox: queue.Queue[tuple[str, object]] = queue.Queue()
        self._asked: list[int] = []
        self.exposed_s = 0.0
        """How long the last `get` waited."""

    def get(self, step: int) -> Plan:
        """Step `step`'s plan; steps are asked for in order.

        Raises:
            PlanError: the planner refused the step; the sentence is the planner's.
            TimeoutError: the plan did not come in time.
            PlanningEnded: the planning process ended.
        """
        begun = time.perf_counter()
        if self._asked and self._asked[0] != step:
            self.close()
        self._ask_up_to(step)
        try:
            kind, value = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"HDP waited {self._timeout_s:.0f} s for the planning process to plan step {step}: "
                f"use another --hdp-strategy, or raise --hdp-timeout-minutes."
            ) from None
        self._asked.pop(0)
        self.exposed_s = time.perf_counter() - begun
        if kind == "error":
            raise PlanError(f"step {step} cannot be planned: {value}")
        if kind == "gone":
            raise PlanningEnded(
                f"HDP's planning process ended while step {step} was planned: its own error, if it "
                f"had one, is printed above; else something killed it, and this machine's memory "
                f"may be full."
            )
        assert isinstance(value, Plan)
        return value

    def close(self) -> None:
        """Ends the process and forgets what was asked. Idempotent; `get` starts a new one."""
        if self._process is None:
            return
        self._outbox.put(None)
        kill_and_wait(self._process, "planning process")
        self._process = None
        self._outbox, self._inbox, self._asked = queue.Queue(), queue.Queue(), []

    def _ask_up_to(self, step: int) -> None:
        if self._process is None:
            self._start()
        following = self._asked[-1] + 1 if self._asked else step
        for wanted in range(following, step + self._depth + 1):
            if wanted == step or self._has(wanted):
                self._outbox.put(self._request(wanted))
                self._asked.append(wanted)

    def _start(self) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        with signals_blocked():  # the process inherits that, and keeps it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_hdp.planning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Threads, for neither side may block on a full pipe while the other one writes.
        streams = (self._process.stdin, self._outbox), (self._process.stdout, self._inbox)
        threading.Thread(target=_send, args=streams[0], daemon=True).start()
        threading.Thread(target=_receive, args=streams[1], daemon=True).start()
        self._outbox.put(self._config)


def _send(stream: IO[bytes], outbox: queue.Queue[object]) -> None:
    """Writes what is put in the outbox; None, or a process that ended, ends it."""
    with contextlib.suppress(OSError, ValueError):
        while (message := outbox.get()) is not None:
            pickle.dump(message, stream, protocol=5)
            stream.flush()
        stream.close()


def _receive(stream: IO[bytes], inbox: queue.Queue[tuple[str, object]]) -> None:
    """Puts answers into the inbox; ("gone", None) when the process ends."""
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, ValueError):
        while True:
            inbox.put(pickle.load(stream))
    inbox.put(("gone", None))
