# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What travels with a micro-batch through the model, its backward and its recompute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hdp.runtime.communicator import DomainCommunicators
from megatron_hdp.runtime.sharding import (
    BlockCall,
    Boundaries,
    MicroBatchLayout,
    RingStep,
    Rows,
)

if TYPE_CHECKING:
    from megatron_hdp.runtime.attention.transformer_engine import TEMicroBatch


@dataclass(frozen=True)
class VarlenArguments:
    """A Boundaries on the device: what a kernel call takes beside q, k and v."""

    cu_q: torch.Tensor
    """int32 [n+1]."""
    cu_k: torch.Tensor
    """int32 [n+1]."""
    max_q: int
    max_k: int


DeviceRows = slice | torch.Tensor
"""Rows on the device: a slice, or an int64 index tensor."""


@dataclass(frozen=True)
class CallTensors:
    """A BlockCall on the device. Steps that take the same rows share one index tensor."""

    q_rows: DeviceRows
    k_rows: DeviceRows
    arguments: VarlenArguments


@dataclass(frozen=True)
class MicroBatchState:
    """Layout, device tensors and communicators of one micro-batch; made once, before its forward.

    Carried as the plain attribute `hdp` of PackedSeqParams, never through a global.
    """

    layout: MicroBatchLayout
    step: int
    slot: int
    communicators: DomainCommunicators
    positions: torch.Tensor
    """int64 [T] on the device."""
    whole_cu_seqlens: torch.Tensor
    """int32 [2] = [0, T]."""
    own: VarlenArguments
    steps: tuple[CallTensors | None, ...]
    """What to compute with each arriving K/V; None: they are passed on only."""
    step_tokens: int = 0
    """Tokens of the whole step; for logging only."""
    offload_ratio: float = 0.0
    """Share of what each layer saves that waits for backward on the host."""
    transformer_engine: TEMicroBatch | None = None
    """With it Transformer Engine's attention runs the micro-batch, else HDP's ring."""

    @cached_property
    def sequence_of_row(self) -> torch.Tensor:
        """int64 [T] which of the micro-batch's sequences a row is of; `num_sequences`: padding."""
        rows = (*self.layout.rows_per_sequence, self.layout.padding)
        return on_device(self.positions.device, np.repeat(np.arange(len(rows)), rows))

    @cached_property
    def sequence_lengths(self) -> torch.Tensor:
        """int64 [n] whole lengths of the micro-batch's sequences."""
        return on_device(self.positions.device, np.array(self.layout.sequence_lengths, np.int64))

    @property
    def num_sequences(self) -> int:
        return len(self.layout.sequence_lengths)

    @classmethod
    def build(
        cls,
        layout: MicroBatchLayout,
        *,
        step: int,
        slot: int,
        communicators: DomainCommunicators,
        device: torch.device,
        step_tokens: int = 0,
        offload_ratio: float = 0.0,
        transformer_engine: TEMicroBatch | None = None,
    ) -> MicroBatchState:
        return cls(
            step_tokens=step_tokens,
            layout=layout,
            step=step,
            slot=slot,
            communicators=communicators,
            positions=on_device(device, layout.positions),
            offload_ratio=offload_ratio,
            transformer_engine=transformer_engine,
            whole_cu_seqlens=on_device(device, np.array([0, layout.num_tokens], np.int32)),
            own=_arguments(device, layout.own),
            steps=_steps(device, layout.steps),
        )


def _steps(
    device: torch.device, ring_steps: tuple[RingStep, ...]
) -> tuple[CallTensors | None, ...]:
    indices: dict[bytes, torch.Tensor] = {}

    def rows(given: Rows) -> DeviceRows:
        if isinstance(given, slice):
            return given
        key = given.tobytes()
        if key not in indices:
            indices[key] = on_device(device, given)
        return indices[key]

    def call(given: BlockCall) -> CallTensors:
        return CallTensors(
            rows(given.q_rows), rows(given.k_rows), _arguments(device, given.boundaries)
        )

    return tuple(None if step.call is None else call(step.call) for step in ring_steps)


def _arguments(device: torch.device, boundaries: Boundaries) -> VarlenArguments:
    return VarlenArguments(
        on_device(device, boundaries.cu_q),
        on_device(device, boundaries.cu_k),
        boundaries.max_q,
        boundaries.max_k,
    )


def on_device(device: torch.device, array: NDArray[np.integer]) -> torch.Tensor:
    """A plan's array as a tensor; on a GPU without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
