# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint's first save starts a process per rank that imports the training script again."""

from __future__ import annotations

import queue

from megatron_hdp.cpu.faults.fault import Fault


def _needed() -> bool:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    return filesystem_async._results_queue is None


def _handle() -> None:
    # The writer puts and this process takes, so an ordinary queue does. A process of its own is
    # needed by --async-save alone, which CPU mode does not have.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


FAULT = Fault(
    symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    seen="the first save takes 14 s on 4 ranks of 2 cores instead of 0.3 s",
    where="CPU mode (slow anywhere; needed there for --async-save)",
    needed=_needed,
    handle=_handle,
    cpu_mode_only=True,
)
