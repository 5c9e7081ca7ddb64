# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokenises coming shards in a process of its own, so that training's interpreter stays free.

It only makes things sooner: a shard that is not there when needed is tokenised by who needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from pathlib import Path

from megatron_hdp.data.streams.store import TokenStore
from megatron_hdp.planning.child_process import kill_and_wait, signals_blocked

logger = logging.getLogger(__name__)

_END_S = 10.0
"""A killed process is gone long before."""


class TokeniseAhead:
    """Hands shard numbers of a store to the process; started with the first one."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._jobs: queue.Queue[int | None] = queue.Queue(maxsize=64)
        self._feeding: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, shards: list[int]) -> None:
        """Asks for these shards, soonest first; never waits."""
        if not shards:
            return
        if self._feeding is None:
            self._feeding = threading.Thread(target=self._feed, name="hdp tokenise", daemon=True)
            self._feeding.start()
            atexit.register(self.close)
        with contextlib.suppress(queue.Full):
            for shard in shards:
                self._jobs.put_nowait(shard)

    def close(self) -> None:
        """Ends the process, in the middle of a shard if it must. Idempotent."""
        if self._feeding is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._process is not None:
            kill_and_wait(self._process, "tokenising process")
        self._feeding.join(_END_S)
        self._feeding = self._process = None
        atexit.unregister(self.close)

    def _feed(self) -> None:
        try:
            store = pickle.dumps(self._store)
        except Exception as error:  # whatever a tokenizer's library raises
            logger.warning("hdp: shards are tokenised when needed, not ahead: %s", error)
            return
        self._process = process = self._start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(store)
            while (shard := self._jobs.get()) is not None:
                pickle.dump(shard, process.stdin)
                process.stdin.flush()

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with signals_blocked():
            return subprocess.Popen(
                [sys.executable, "-m", "megatron_hdp.data.streams.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
