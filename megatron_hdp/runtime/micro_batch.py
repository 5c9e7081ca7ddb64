# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What travels with a micro-batch through the model, its backward and its recompute."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_hdp.runtime.communicator import DomainCommunicators
from megatron_hdp.runtime.head_split import split_heads
from megatron_hdp.runtime.sharding import (
    BlockCall,
    Boundaries,
    MicroBatchLayout,
    RingStep,
    Rows,
)
from megatron_hdp.runtime.windows import windowed_calls

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
    window: int | None = None
    """As in Boundaries."""


DeviceRows = slice | torch.Tensor
"""Rows on the device: a slice, or an int64 index tensor."""


@dataclass(frozen=True)
class CallTensors:
    """A BlockCall on the device. Steps that take the same rows share one index tensor."""

    q_rows: DeviceRows
    k_rows: DeviceRows
    arguments: VarlenArguments


@dataclass(frozen=True)
class DirectRows:
    """Rows of K and V that go straight to the members that see them; as in WindowedCalls."""

    received: tuple[int, ...]
    sent: tuple[DeviceRows | None, ...]


@dataclass(frozen=True)
class AttentionCalls:
    """The kernel calls of one layer, the same in forward and backward."""

    own: VarlenArguments
    """Step 0: causal, over all that is here."""
    blocks: tuple[tuple[CallTensors, ...], ...]
    """What else to compute with the K/V of each hop; hop 0: this rank's own. Without a ring: ()."""
    direct: DirectRows | None = None
    """What members send each other directly; None: K/V go round whole."""


@dataclass(frozen=True)
class HeadSplitState:
    """A HeadSplit on the device."""

    members: tuple[int, ...]
    """HDP ranks that split heads, in ring order."""
    place: int
    """Mine among them."""
    shared: MicroBatchState
    """What they hold together, as a micro-batch of its own, with my share of the heads."""
    rows: tuple[DeviceRows, ...]
    """Each member's rows in `shared`, in the order of its ring prefix."""
    rest: VarlenArguments | None
    """One causal call over local sequences and padding, with all heads; None: there are none."""


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
    head_split: HeadSplitState | None = None
    """With it the ring's members split heads; `steps` is then empty."""

    _windowed: dict[int, AttentionCalls] = field(default_factory=dict, repr=False, compare=False)

    def calls(self, window: int | None) -> AttentionCalls:
        """The kernel calls of a layer; those for a window are made when first asked for.

        Args:
            window: tokens that a token sees before itself; None: all.
        """
        if window is None:
            full = ((), *(() if call is None else (call,) for call in self.steps))
            return AttentionCalls(self.own, full if self.steps else ())
        if window not in self._windowed:
            calls, device = windowed_calls(self.layout, window), self.positions.device
            move = _CallMover(device)
            self._windowed[window] = AttentionCalls(
                _arguments(device, calls.own),
                tuple(tuple(move(call) for call in hop) for hop in calls.blocks),
                DirectRows(
                    calls.received,
                    tuple(None if rows is None else move.rows(rows) for rows in calls.sent),
                ),
            )
        return self._windowed[window]

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
            head_split=_head_split(layout, step, slot, communicators, device),
        )


def _head_split(
    layout: MicroBatchLayout,
    step: int,
    slot: int,
    communicators: DomainCommunicators,
    device: torch.device,
) -> HeadSplitState | None:
    split = split_heads(layout)
    if split is None:
        return None
    move = _CallMover(device)
    return HeadSplitState(
        split.members,
        split.place,
        MicroBatchState.build(
            split.shared, step=step, slot=slot, communicators=communicators, device=device
        ),
        tuple(move.rows(rows) for rows in split.rows),
        None if split.rest is None else _arguments(device, split.rest),
    )


class _CallMover:
    """Moves BlockCalls to a device; equal rows become one index tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indices: dict[bytes, torch.Tensor] = {}

    def __call__(self, call: BlockCall) -> CallTensors:
        return CallTensors(
            self.rows(call.q_rows),
            self.rows(call.k_rows),
            _arguments(self._device, call.boundaries),
        )

    def rows(self, rows: Rows) -> DeviceRows:
        if isinstance(rows, slice):
            return rows
        key = rows.tobytes()
        if key not in self._indices:
            self._indices[key] = on_device(self._device, rows)
        return self._indices[key]


def _steps(
    device: torch.device, ring_steps: tuple[RingStep, ...]
) -> tuple[CallTensors | None, ...]:
    move = _CallMover(device)
    return tuple(None if step.call is None else move(step.call) for step in ring_steps)


def _arguments(device: torch.device, boundaries: Boundaries) -> VarlenArguments:
    return VarlenArguments(
        on_device(device, boundaries.cu_q),
        on_device(device, boundaries.cu_k),
        boundaries.max_q,
        boundaries.max_k,
        boundaries.window,
    )


def on_device(device: torch.device, array: NDArray[np.integer]) -> torch.Tensor:
    """A plan's array as a tensor; on a GPU without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
