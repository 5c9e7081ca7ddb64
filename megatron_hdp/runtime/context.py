# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The micro-batch whose forward step runs right now, on this thread.

It exists only between the schedule's call of the forward step and its return. From the model's
entry on, the state travels in PackedSeqParams: backward and recompute run while another micro-batch
is current, so nothing below the model may read this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hdp.runtime.micro_batch import MicroBatchState


@dataclass(frozen=True)
class CurrentMicroBatch:
    """State and CPU batch of one micro-batch."""

    state: MicroBatchState
    batch: dict[str, torch.Tensor | None]


_current: ContextVar[CurrentMicroBatch | None] = ContextVar("hdp_micro_batch", default=None)


def current_micro_batch() -> CurrentMicroBatch | None:
    """The one whose forward step runs on this thread, or None."""
    return _current.get()


@contextmanager
def running(micro_batch: CurrentMicroBatch) -> Iterator[None]:
    """Marks `micro_batch` as the one whose forward step runs."""
    token = _current.set(micro_batch)
    try:
        yield
    finally:
        _current.reset(token)


def batch_on_device() -> dict[str, Any]:
    """The current micro-batch's tensors on this rank's device, with the keys scripts read."""
    micro_batch = _current.get()
    if micro_batch is None:
        raise RuntimeError(
            "no HDP micro-batch runs: the schedule was called without HDP's iterator"
        )
    return {
        key: value.cuda(non_blocking=True) if value is not None else None
        for key, value in micro_batch.batch.items()
    }
