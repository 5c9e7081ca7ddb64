# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Work on a thread of its own that says what it is at, so that a wait for it can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

_GRACE_S = 5.0
"""What each part of the work waits for has the same timeout; its own message is the better one."""


class Preparation[T]:
    """Runs `work(self)` at once, on a daemon thread.

    A daemon: a rank that fails must end at once, not wait for others in a comparison first.

    Args:
        name: the thread's, and the work's in messages ("step 7 of train").
        work: calls `at()` as it goes on.
    """

    def __init__(self, name: str, work: Callable[[Preparation[T]], T]) -> None:
        self._name = name
        self._future: Future[T] = Future()
        self.at("started")
        threading.Thread(target=self._run, args=(work,), name=f"hdp {name}", daemon=True).start()

    def at(self, part: str) -> None:
        """The work has come to this part: a participle, for "to be ..."."""
        self._part, self._since = part, time.monotonic()

    def result(self, timeout_s: float) -> T:
        """What the work returns, or raises.

        Args:
            timeout_s: how long any part of the work may take.

        Raises:
            TimeoutError: a part took longer; the message names it.
        """
        while True:
            left = self._since + timeout_s + _GRACE_S - time.monotonic()
            try:
                return self._future.result(timeout=max(0.0, left))
            except TimeoutError:
                if self._future.done():  # the work's own
                    raise
                if time.monotonic() - self._since < timeout_s:
                    continue
            raise TimeoutError(
                f"HDP waited {timeout_s:.0f} s for {self._name} to be {self._part}: raise "
                f"--hdp-timeout-minutes if the machine or its storage is that slow."
            )

    def _run(self, work: Callable[[Preparation[T]], T]) -> None:
        try:
            self._future.set_result(work(self))
        except BaseException as error:
            self._future.set_exception(error)
