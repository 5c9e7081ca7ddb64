# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Work on coming steps, in order, on one thread and at most so far ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Prefetch[T]:
    """Does `work(step)` for the step that is asked for and for `depth` after it, never more.

    Args:
        name: the thread's.
        work: called on one daemon thread, in step order; what it raises, `get` raises.
        has: whether step k exists; nothing is begun past the last one.
        depth: steps ahead; what they give is all that is held.
    """

    def __init__(
        self, name: str, work: Callable[[int], T], has: Callable[[int], bool], depth: int
    ) -> None:
        self._name, self._work, self._has, self._depth = name, work, has, depth
        self._changed = threading.Condition()
        self._results: dict[int, Future[T]] = {}
        self._limit = -1
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, step: int, timeout_s: float) -> T:
        """What the work gave for `step`; may be asked again until a later step is.

        Raises:
            TimeoutError: it was not there in time.
        """
        with self._changed:
            for old in [known for known in self._results if known < step]:
                del self._results[old]
            future = self._results.setdefault(step, Future())
            self._limit = max(self._limit, step + self._depth)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(step,), name=self._name, daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return future.result(timeout=timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Begins nothing more and waits for what is under way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                while not self._closed and step > self._limit:
                    self._changed.wait()
                asked = step in self._results
                if self._closed or not (asked or self._has(step)):
                    self._thread = None
                    return
                future = self._results.setdefault(step, Future())
            with contextlib.suppress(Exception):  # the one who asks gets it
                self._fill(future, step)
            step += 1

    def _fill(self, future: Future[T], step: int) -> None:
        try:
            future.set_result(self._work(step))
        except BaseException as error:
            future.set_exception(error)
            raise
