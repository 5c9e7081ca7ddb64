# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Selective activation offload: a share of what each layer saves waits for backward on the host.

ByteScale (arXiv 2502.21231), section 5.2. While a layer's forward runs, the previous layer's bytes
travel out; while its backward runs, the previous layer's come back. Two layers are whole on the
device at any time, of the others a share 1 - r (Eq. 3).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch

from megatron_hdp.runtime.offload.account import Account, LayerCount, Totals
from megatron_hdp.runtime.offload.layer import Means, SavedLayer
from megatron_hdp.runtime.offload.saved import Block, Kept, SavedView
from megatron_hdp.runtime.offload.slabs import HostSlabs
from megatron_hdp.runtime.offload.transport import Transport, transport_for

_MARKS = ("_TE_do_not_offload", "_do_not_offload")
"""Set by Transformer Engine, and by Megatron, on tensors that must stay."""


class ActivationOffload:
    """One process's offload: its host memory, its copy streams, its counts.

    Args:
        host_bytes: hard limit of host memory. Past it tensors stay on the device, and
            `totals.refused_bytes` counts them.
        transport: default: the one of `device`.
        device: default: the current CUDA device, or the CPU without one.
    """

    def __init__(
        self,
        host_bytes: int,
        *,
        device: torch.device | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.transport = transport or transport_for(device or _current_device())
        self.slabs = HostSlabs(self.transport, host_bytes)
        self.account = Account()
        self.totals = Totals()
        self._owners: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
        """Tells where layers begin (by forward pre-hooks), and whose parameters never move.

        Args:
            layers: any order; each one's forward begins a layer.
        """
        self.protect(model)
        mark_layers(layers)

    def protect(self, model: torch.nn.Module) -> None:
        """Keeps a model's parameters and buffers where they are. Idempotent."""
        self._owners.add(model)

    def activations(self, ratio: float, keep: Iterable[torch.Tensor] = ()) -> MicroBatchOffload:
        """The context of one micro-batch's forward; its backward needs none.

        Any number of micro-batches may be in flight, and go backward in any order. Run backward
        outside of the context.

        Args:
            ratio: share of each layer's saved bytes to offload, 0 to 1; the last layer's stay.
            keep: tensors that all layers share, and that would gain nothing by moving.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"offload ratio {ratio}: give a share from 0 to 1")
        return MicroBatchOffload(self, ratio, keep)

    def fixed_storages(self) -> set[int]:
        """Storages of the watched models' parameters and buffers, wherever they lie by now.

        By storage, since a layer saves `weight.t()`, a plain tensor.
        """
        return {
            tensor.untyped_storage()._cdata
            for owner in self._owners
            for tensor in (*owner.parameters(), *owner.buffers())
        }


class MicroBatchOffload:
    """One micro-batch's forward under offload."""

    def __init__(
        self, engine: ActivationOffload, ratio: float, keep: Iterable[torch.Tensor]
    ) -> None:
        self.ratio = ratio
        self.layers: list[LayerCount] = []
        """One per layer, the last one included, once the forward is over."""
        self._engine = engine
        self._account = Account(engine.account)
        self._means = Means(engine.transport, engine.slabs, self._account)
        self._fixed = engine.fixed_storages()
        self._fixed |= {tensor.untyped_storage()._cdata for tensor in keep}
        self._known: dict[int, weakref.ref[Block]] = {}
        self._layer: SavedLayer | None = None
        self._leaving: SavedLayer | None = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._token: Token[MicroBatchOffload | None] | None = None

    @property
    def device_peak(self) -> int:
        """Most bytes that its saved tensors held on the device at once."""
        return self._account.device_peak

    def __enter__(self) -> MicroBatchOffload:
        if _running.get() is not None:
            raise RuntimeError(
                "activation offload contexts cannot be nested: leave the outer first"
            )
        self._token = _running.set(self)
        self._layer = SavedLayer(self._means, None)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._hooks is not None
        assert self._token is not None
        self._hooks.__exit__(kind, error, trace)
        _running.reset(self._token)
        self._end_layer(0.0)  # the last one's backward comes at once
        # Only autograd's records keep layers alive from here on.
        self._layer, self._leaving, self._hooks, self._token = None, None, None, None
        self._known.clear()

    def next_layer(self) -> None:
        """A layer's forward begins; whatever was saved until now belongs to the one before.

        Under full recompute a layer runs inside a checkpoint, which saves its inputs after it: they
        belong to the layer that ran, and layers of one checkpoint count as one.
        """
        assert self._layer is not None
        if not self._layer.is_empty:
            previous = self._layer
            self._end_layer(self.ratio)
            self._layer = SavedLayer(self._means, previous)

    def _end_layer(self, ratio: float) -> None:
        assert self._layer is not None
        count, shared = self._layer.close(ratio, before_moving=self._let_go)
        self._leaving = self._layer
        self._known.update((block.storage_key(), weakref.ref(block)) for block in shared)
        self.layers.append(count)
        self._engine.totals.count(count)

    def _let_go(self) -> None:
        """Frees what moved out while the last layer ran."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        for key in leaving.leave_device():
            self._known.pop(key, None)

    def _pack(self, tensor: torch.Tensor) -> Kept | SavedView:
        assert self._layer is not None
        if not self._may_move(tensor):
            return Kept(tensor)
        key = tensor.untyped_storage()._cdata
        ref = self._known.get(key)
        known = None if ref is None else ref()
        return self._layer.add(tensor, known)

    def _may_move(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if not self._means.transport.holds(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.numel() * tensor.itemsize < self._means.transport.min_bytes:
            return False
        if any(getattr(tensor, mark, False) for mark in _MARKS):
            return False
        return tensor.untyped_storage()._cdata not in self._fixed


_running: ContextVar[MicroBatchOffload | None] = ContextVar("hdp_offload", default=None)


def mark_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Lets every context see where these layers begin."""
    for layer in layers:
        layer.register_forward_pre_hook(_layer_begins)


def _layer_begins(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    running = _running.get()
    if running is not None:
        running.next_layer()


def _unpack(packed: Kept | SavedView) -> torch.Tensor:
    return packed.fetch()


def _current_device() -> torch.device:
    if torch.accelerator.is_available():  # unlike torch.cuda's, it is not stood in for on a CPU
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
