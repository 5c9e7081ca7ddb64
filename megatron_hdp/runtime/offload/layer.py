# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What one layer of one micro-batch saved: gathered in its forward, brought back in its backward.

Its `SavedView`s hold it, so backward finds it through autograd's own records: no schedule, and no
number of micro-batches in flight, can mix layers up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from megatron_hdp.runtime.offload.account import Account, LayerCount
from megatron_hdp.runtime.offload.saved import Block, SavedView
from megatron_hdp.runtime.offload.selection import choose, granule
from megatron_hdp.runtime.offload.slabs import HostSlabs
from megatron_hdp.runtime.offload.transport import Transport

_WHOLE = 0.8
"""Views that cover this share of a storage make it a block; others become blocks of their own."""


@dataclass
class _Storage:
    """A storage that this layer saved views of, while the layer's forward runs."""

    storage: torch.UntypedStorage
    views: dict[tuple[object, ...], SavedView] = field(default_factory=dict)


@dataclass(frozen=True)
class Means:
    """What moves bytes, and who counts them."""

    transport: Transport
    slabs: HostSlabs
    account: Account


class SavedLayer:
    """The saved tensors of one layer in one micro-batch.

    Args:
        previous: the layer before, whose backward comes after this one's.
    """

    def __init__(self, means: Means, previous: SavedLayer | None) -> None:
        self._means = means
        self._previous = previous
        self._open: dict[int, _Storage] = {}
        self._blocks: list[weakref.ref[Block]] = []
        self._leaving: list[Block] = []
        self._in_backward = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved yet."""
        return not self._open and not self._blocks

    def add(self, tensor: torch.Tensor, known: Block | None) -> SavedView:
        """Takes a tensor that autograd saves.

        Args:
            known: the block that an earlier layer made of this storage, when it still lies on the
                device: then nothing is counted or copied twice.
        """
        if known is not None:
            view = SavedView(tensor, self)
            view.block = known
            known.views.append(weakref.ref(view))
            self._blocks.append(weakref.ref(known))
            return view
        storage = tensor.untyped_storage()
        found = self._open.setdefault(storage._cdata, _Storage(storage))
        key = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return found.views.setdefault(key, SavedView(tensor, self))

    def close(
        self, ratio: float, before_moving: Callable[[], None]
    ) -> tuple[LayerCount, list[Block]]:
        """Ends the layer's forward: `ratio` of what it saved begins to move.

        Args:
            before_moving: called when the layer is counted; frees what moved out meanwhile.

        Returns:
            the counts, and the blocks of whole storages, which later layers may save views of.
        """
        saved, shared = self._make_blocks()
        before_moving()
        movable = [block for block in saved if not block.is_stale()]
        amounts = [0] * len(movable)
        if ratio:
            granules = [_granule(block) for block in movable]
            amounts = choose([block.num_bytes for block in movable], granules, ratio)
        ready = self._means.transport.now() if any(amounts) else None
        moved = refused = 0
        for block, amount in zip(movable, amounts, strict=True):
            if amount and block.offload(amount, ready):
                self._leaving.append(block)
                moved += amount
            else:
                refused += amount
        self._blocks += [weakref.ref(block) for block in saved]
        return LayerCount(sum(block.num_bytes for block in saved), moved, refused), shared

    def leave_device(self) -> list[int]:
        """Frees the device memory of what moved; returns the keys of the storages."""
        left, self._leaving = self._leaving, []
        keys = [block.storage_key() for block in left]
        for block in left:
            block.leave_device()
        return keys

    def backward_begins(self) -> None:
        """Brings this layer back, and the one before; two before where memory allows it.

        It does when the micro-batch then holds no more on the device than its forward did.
        """
        if self._in_backward:
            return
        self._in_backward = True
        self.reload()
        if self._previous is None:
            return
        self._previous.reload()
        second = self._previous._previous
        if second is not None and second._fits():
            second.reload()

    def reload(self) -> None:
        """Begins to bring back what autograd still holds of it."""
        for block in self._live():
            block.reload()

    def _fits(self) -> bool:
        account = self._means.account
        coming = sum(block.bytes_to_return for block in self._live())
        return account.device_bytes + coming <= account.device_peak

    def _live(self) -> Iterator[Block]:
        return (block for block in (ref() for ref in self._blocks) if block is not None)

    def _make_blocks(self) -> tuple[list[Block], list[Block]]:
        """(all blocks that autograd holds views of, those that are whole storages)."""
        made, whole = [], []
        while self._open:
            blocks, covers = self._blocks_of(self._open.popitem()[1])
            made += blocks
            whole += blocks if covers else []
        return [b for b in made if b.live_views()], [b for b in whole if b.live_views()]

    def _blocks_of(self, found: _Storage) -> tuple[list[Block], bool]:
        """Blocks of one storage's views, and whether it moves as a whole."""
        views = list(found.views.values())
        if any(view.is_emptied() for view in views):
            # CheckpointWithoutOutput freed it, and fills the same storage again in backward.
            return [], False
        distinct = {view.elements(): view.num_bytes for view in views}
        if sum(distinct.values()) >= _WHOLE * found.storage.nbytes():
            return [self._block(views, found.storage.nbytes())], True
        # A copy of the views' own elements lets the storage go, of which they need but a part.
        for view in views:
            if not view.is_stale():
                view.make_dense()
        return [self._block([view], view.num_bytes) for view in views], False

    def _block(self, views: list[SavedView], num_bytes: int) -> Block:
        return Block(
            views, num_bytes, self._means.transport, self._means.slabs, self._means.account
        )


def _granule(block: Block) -> int:
    view = block.live_views()[0]
    return granule(view.size, view.dtype.itemsize)
