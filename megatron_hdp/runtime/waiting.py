# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Every wait for another process says, when it fails, who waited for whom, and how long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def waiting(whom: str) -> Iterator[None]:
    """Names what a wait was for when the transport under it fails or times out.

    Args:
        whom: ends the sentence "rank 3 waited 12.0 s for ...".

    Raises:
        RuntimeError: the transport's error, behind that sentence.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - begun
        raise RuntimeError(
            f"HDP: rank {dist.get_rank()} waited {waited:.1f} s for {whom}: {_one_line(error)}"
        ) from error


def _one_line(error: RuntimeError) -> str:
    """The transport's message without the stack that NCCL and gloo may append."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
