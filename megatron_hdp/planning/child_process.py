# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How our helper processes start beside a training process, and how they are ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Iterator

_logger = logging.getLogger(__name__)

_END_S = 10.0
"""Longest wait for a killed process; only one that is stuck in the kernel takes longer."""


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Requests to end come to whole jobs, and a rank still needs plans to end in good order."""
    requests = {getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "USR1", "USR2")}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, requests)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_and_wait(process: subprocess.Popen[bytes], what: str) -> None:
    """Ends a process of ours; says so and goes on where the kernel doesn't let it end.

    Args:
        what: names the process in "waited 10 s for its <what> 4711 to end".
    """
    with contextlib.suppress(OSError):
        process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _logger.warning(
            "hdp: rank %s waited %.0f s for its %s %d to end after SIGKILL, and goes on without; "
            "is the machine's storage stuck?",
            os.environ.get("RANK", "0"), _END_S, what, process.pid,
        )  # fmt: skip
