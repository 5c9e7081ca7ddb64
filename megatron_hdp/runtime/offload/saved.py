# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Saved tensors and the memory under them.

Autograd holds a `SavedView` in place of each tensor. Views of one storage share a `Block`, which is
what moves: so nothing is copied twice, whatever shape or stride it was saved with.
"""

from __future__ import annotations

import sys
import weakref
from typing import Protocol

import torch

from megatron_hdp.runtime.offload.account import Account
from megatron_hdp.runtime.offload.slabs import Allocation, HostSlabs
from megatron_hdp.runtime.offload.transport import Copies, Event, Transport


class BackwardListener(Protocol):
    """Told when the backward of what it stands for begins."""

    def backward_begins(self) -> None: ...


class StaleTensorError(RuntimeError):
    """A tensor was changed in place after it was saved for backward."""


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise _stale(tensor.dtype, tuple(tensor.shape), version, tensor._version)


def _stale(dtype: torch.dtype, shape: tuple[int, ...], saved: int, found: int) -> StaleTensorError:
    return StaleTensorError(
        f"a saved tensor of {dtype}{list(shape)} was changed in place after its forward (version "
        f"{found}, saved at {saved}), so its gradient would be wrong: change a copy of it instead."
    )


class Kept:
    """A saved tensor that never moves: parameters, small ones, and those marked so."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def fetch(self) -> torch.Tensor:
        """The tensor; an object of its own, since Transformer Engine empties what it has read.

        Raises:
            StaleTensorError: it was changed since; with hooks autograd itself does not look.
        """
        _check_version(self.tensor, self.version)
        return self.tensor.detach()


class SavedView:
    """One saved tensor: how to make it from its block, wherever that is."""

    __slots__ = (
        "__weakref__", "block", "changed", "dtype", "listener", "offset", "size", "stride",
        "tensor", "version",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, listener: BackwardListener) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.listener = listener
        self.block: Block | None = None
        self.changed = 0
        """The version that it had when it left the device, if it was another one by then."""

    @property
    def num_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def is_emptied(self) -> bool:
        """Whether its memory was taken away under it."""
        return self.tensor is not None and self.tensor.untyped_storage().nbytes() == 0

    def is_stale(self) -> bool:
        """Whether it was changed since it was saved; only while it lies on the device."""
        return self.tensor is not None and self.tensor._version != self.version

    def elements(self) -> tuple[object, ...]:
        """Equal for views that hold the same elements in whatever shape or order of dimensions."""
        dims: list[list[int]] = []
        for stride, size in sorted(zip(self.stride, self.size, strict=True), reverse=True):
            if size == 1:
                continue
            if dims and dims[-1][0] == stride * size:
                dims[-1] = [stride, dims[-1][1] * size]
            else:
                dims.append([stride, size])
        return (self.dtype, self.offset, *map(tuple, dims))

    def fetch(self) -> torch.Tensor:
        """The tensor, a new object each time, on the device once compute gets to it.

        Raises:
            StaleTensorError: it was changed in place since it was saved.
        """
        self.listener.backward_begins()
        if self.tensor is not None:  # never moved
            _check_version(self.tensor, self.version)
            return self.tensor.detach()
        if self.changed:
            raise _stale(self.dtype, tuple(self.size), self.version, self.changed)
        assert self.block is not None
        storage = self.block.fetch()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def leave_device(self) -> None:
        """Lets go of the memory that it was saved in."""
        if self.tensor is not None and self.is_stale():
            self.changed = self.tensor._version
        self.tensor = None

    def make_dense(self) -> None:
        """Moves to memory of its own, without what lies between its elements."""
        assert self.tensor is not None
        dense = torch.empty_like(self.tensor)
        dense.copy_(self.tensor)
        self.tensor, self.version = dense, dense._version
        self.stride, self.offset = dense.stride(), 0


class Block:
    """Memory of saved views: on the device, on the host, or cut between both.

    Views hold their block, never the reverse, so that it goes when autograd drops the last of them.
    """

    __slots__ = (
        "__weakref__", "_account", "_arrived", "_fetched", "_host", "_host_bytes", "_kept",
        "_slabs", "_storage", "_transport", "_written", "num_bytes", "views",
    )  # fmt: skip

    def __init__(
        self, views: list[SavedView], num_bytes: int, transport: Transport, slabs: HostSlabs,
        account: Account,
    ) -> None:  # fmt: skip
        tensor = views[0].tensor
        assert tensor is not None
        self.num_bytes = num_bytes
        self.views = [weakref.ref(view) for view in views]
        for view in views:
            view.block = self
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self._transport = transport
        self._slabs = slabs
        self._account = account
        self._host: Allocation | None = None
        self._host_bytes = 0
        self._kept: torch.Tensor | None = None
        self._written: Event = None
        self._arrived: Event = None
        self._fetched = True
        account.add(num_bytes)

    @property
    def is_away(self) -> bool:
        """Whether its memory is on the host, in part or whole."""
        return self._storage is None

    @property
    def bytes_to_return(self) -> int:
        """Device bytes that `reload` will add."""
        return self._host_bytes if self.is_away else 0

    def storage_key(self) -> int:
        """Identifies its storage among the living ones; only while it lies on the device."""
        assert self._storage is not None
        return self._storage._cdata

    def is_stale(self) -> bool:
        """Whether a view was changed since it was saved; only while it lies on the device."""
        return any(view.is_stale() for view in self.live_views())

    def live_views(self) -> list[SavedView]:
        """Views that autograd still holds."""
        return [view for view in (ref() for ref in self.views) if view is not None]

    def offload(self, num_bytes: int, ready: Event) -> bool:
        """Begins to copy the first `num_bytes` to the host; False when there is no room.

        The device memory stays until `leave_device`.
        """
        allocation = self._slabs.allocate(num_bytes)
        if allocation is None:
            return False
        source = self._bytes()
        self._host, self._host_bytes = allocation, num_bytes
        copies = self._pairs(source)
        self._written = self._transport.to_host(copies, (ready, *allocation.after))
        if num_bytes < self.num_bytes:
            self._kept = source[num_bytes:].clone()
            self._account.add(len(self._kept))
        return True

    def leave_device(self) -> None:
        """Frees the device memory; compute must wait for the copy first, which this sees to."""
        self._transport.wait(self._written)
        for view in self.live_views():
            view.leave_device()
        self._storage = None
        self._account.add(-self.num_bytes)

    def reload(self) -> None:
        """Begins to copy back to new device memory, and gives the host memory up."""
        if self._host is None or not self.is_away:
            return
        buffer = self._transport.device_buffer(self.num_bytes)
        self._account.add(self.num_bytes)
        if self._kept is not None:
            buffer[self._host_bytes :].copy_(self._kept)
            self._account.add(-len(self._kept))
            self._kept = None
        copies = [(host, device) for device, host in self._pairs(buffer)]
        after = (self._transport.now(), self._written)
        self._arrived = self._transport.to_device(copies, after)
        self._fetched = False
        self._slabs.free(self._host.pieces, self._arrived)
        self._host = None
        self._storage = buffer.untyped_storage()

    def fetch(self) -> torch.UntypedStorage:
        """Its device memory; compute waits until the bytes have arrived."""
        self.reload()
        assert self._storage is not None
        # Every time: who asks may run on another stream than who asked before.
        self._transport.wait(self._arrived)
        self._fetched = True
        return self._storage

    def _bytes(self) -> torch.Tensor:
        """uint8 [num_bytes] over its device memory."""
        assert self._storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def _pairs(self, device: torch.Tensor) -> Copies:
        """(device, host) ranges of what is offloaded."""
        assert self._host is not None
        pairs, at = [], 0
        for host in self._slabs.views(self._host, self._host_bytes):
            pairs.append((device[at : at + len(host)], host))
            at += len(host)
        return pairs

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self._host is not None:  # dropped without a backward
            self._slabs.free(self._host.pieces, self._written)
        if not self._fetched:
            # The allocator may hand the memory out at once, while the copy still writes to it.
            self._transport.wait(self._arrived)
        left = 0 if self.is_away else self.num_bytes
        self._account.add(-left - (0 if self._kept is None else len(self._kept)))
