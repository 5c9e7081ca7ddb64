# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Sums of small tensors over a ring, without a group: they travel round it as K/V do."""

from __future__ import annotations

import torch

from megatron_hdp.runtime.communicator import TransferLabel
from megatron_hdp.runtime.micro_batch import MicroBatchState


def ring_sum(mine: torch.Tensor, state: MicroBatchState, layer: int) -> torch.Tensor:
    """The sum of all members' `mine` (contiguous, the same shape), in the same order on each.

    Raises:
        RuntimeError: a member did not come within the timeout.
    """
    ring = state.layout.ring
    if not ring:
        return mine
    size, index = len(ring), state.layout.index
    parts = {index: mine}
    passing = mine
    for hop in range(1, size):
        label = TransferLabel(state.step, state.slot, layer, "router", hop, ring)
        passing = state.communicators.exchange(
            "kv",
            passing,
            torch.empty_like(passing),
            to=ring[(index + 1) % size],
            source=ring[(index - 1) % size],
            label=label,
        ).wait()
        parts[(index - hop) % size] = passing
    return torch.stack([parts[member] for member in range(size)]).sum(0)
