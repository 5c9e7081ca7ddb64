# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine's own, kept by a process that ends it when its owner ends.

Not in the owner itself: Ray's daemons end with the process that started them only where that one
ends in good order, and a rank may be killed. `python -m megatron_hdp.data.remote.head FOLDER CPUS`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import psutil

from megatron_hdp.planning.child_process import kill_and_wait, signals_blocked

OBJECT_STORE_BYTES = 128 << 20
"""Plans of some steps, and slices on their way."""
_LONGEST_FOLDER = 40
"""Ray's sockets lie under its folder, and a socket's path may have 107 bytes."""


class Head:
    """The owner's side: starts the keeper and with it the cluster.

    Args:
        cpus: CPUs that actors may ask for.
        timeout_s: how long Ray may take to start.

    Raises:
        RuntimeError: Ray does not start; says why.
        TimeoutError: it takes too long.
    """

    def __init__(self, cpus: int, timeout_s: float) -> None:
        base = tempfile.gettempdir()
        base = base if len(base) <= _LONGEST_FOLDER else "/tmp"
        self._folder = tempfile.mkdtemp(prefix="hdp-ray-", dir=base)
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with signals_blocked():  # Ray's daemons inherit that: requests to end come to whole jobs
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_hdp.data.remote.head", self._folder, str(cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        answer = self._answer(timeout_s)
        if "address" not in answer:
            self.close()
            raise RuntimeError(answer["error"])
        self.address = answer["address"]

    def close(self) -> None:
        """Ends the cluster and waits for that. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            kill_and_wait(self._process, "Ray cluster's keeper")

    def _answer(self, timeout_s: float) -> dict[str, str]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise TimeoutError(f"it did not start in {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": "the process that starts it ended"}


def main() -> None:
    """The keeper: starts Ray, says where, waits until its stdin ends, ends all that it started."""
    folder, cpus = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    try:
        _say(answers, address=_start(folder, cpus))
        sys.stdin.buffer.read()
    except Exception as error:
        _say(answers, error=f"{type(error).__name__}: {error}")
    finally:
        _end_children()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # Ray's own exit handlers would wait for what is gone


def _say(answers: IO[str], **values: str) -> None:
    with contextlib.suppress(OSError):
        answers.write(json.dumps(values) + "\n")
        answers.flush()


def _start(folder: str, cpus: int) -> str:
    import ray

    context = ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    return str(context.address_info["gcs_address"])


def _end_children(patience_s: float = 10.0) -> None:
    """Kills them all; none holds anything that counts. What they start meanwhile too."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


if __name__ == "__main__":
    main()
