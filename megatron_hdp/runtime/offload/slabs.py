# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Host memory for offloaded bytes: slabs that any shape shares, under a hard limit.

Slabs are never keyed by shape: an allocation takes whatever ranges are free, several when no single
one is large enough, so steps of changing shapes need no more slabs than their bytes do. A range
that was given back carries the events of the copies that still touch it; who gets it next must
order its own copy after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_hdp.runtime.offload.transport import Event, Transport

ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one slab."""

    slab: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Host ranges that together hold what was asked for."""

    pieces: tuple[Piece, ...]
    after: tuple[Event, ...]
    """Copies that still read or write these ranges; the next copy into them goes behind."""


@dataclass(slots=True, eq=False)
class _Free:
    start: int
    length: int
    after: tuple[Event, ...]


class HostSlabs:
    """The slabs of one rank.

    Args:
        limit_bytes: no more host memory than this is ever taken.
    """

    def __init__(self, transport: Transport, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        """Bytes of all slabs; they are kept for the life of the program."""
        self.used_bytes = 0
        """Bytes of the ranges that are given out."""
        self.peak_bytes = 0
        self._transport = transport
        self._slabs: list[torch.Tensor] = []
        self._free: list[list[_Free]] = []
        self._returned: deque[tuple[tuple[Piece, ...], Event]] = deque()

    def allocate(self, num_bytes: int) -> Allocation | None:
        """Ranges for `num_bytes`, or None when the limit does not allow them."""
        self._take_back()
        need = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        while self.total_bytes - self.used_bytes < need:
            if not self._add_slab():
                return None
        allocation = self._best_fit(need) or self._gather(need)
        self.used_bytes += need
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return allocation

    def free(self, pieces: tuple[Piece, ...], after: Event) -> None:
        """Gives ranges back; they are in use until `after` has happened.

        Only appends to a deque: tensors die on any thread, even while another one allocates.
        """
        self._returned.append((pieces, after))

    def views(self, allocation: Allocation, num_bytes: int) -> Iterator[torch.Tensor]:
        """The memory of an allocation, uint8, `num_bytes` in all."""
        for piece in allocation.pieces:
            length = min(piece.length, num_bytes)
            yield self._slabs[piece.slab][piece.start : piece.start + length]
            num_bytes -= length

    def settle(self) -> None:
        """Takes back what has been freed, so that `used_bytes` is up to date."""
        self._take_back()

    def _add_slab(self) -> bool:
        room = (self.limit_bytes - self.total_bytes) // ALIGNMENT * ALIGNMENT
        size = min(self._transport.slab_bytes, room)
        if size <= 0:
            return False
        self._slabs.append(self._transport.host_slab(size))
        self._free.append([_Free(0, size, ())])
        self.total_bytes += size
        return True

    def _ranges(self) -> list[tuple[bool, int, int, int]]:
        """(still in a copy, length, slab, position) of every free range."""
        return [
            (bool(free.after), free.length, slab, position)
            for slab, ranges in enumerate(self._free)
            for position, free in enumerate(ranges)
        ]

    def _best_fit(self, need: int) -> Allocation | None:
        fitting = [found for found in self._ranges() if found[1] >= need]
        if not fitting:
            return None
        _, _, slab, position = min(fitting)
        free = self._free[slab][position]
        return Allocation((self._cut(slab, free, need),), free.after)

    def _gather(self, need: int) -> Allocation:
        """The largest free ranges, as many as it takes; `allocate` has seen that they suffice."""
        pieces: list[Piece] = []
        after: list[Event] = []
        order = sorted(self._ranges(), key=lambda found: (found[0], -found[1]))
        for _, length, slab, free in [(*f[:3], self._free[f[2]][f[3]]) for f in order]:
            take = min(length, need)
            after += free.after
            pieces.append(self._cut(slab, free, take))
            need -= take
            if not need:
                break
        return Allocation(tuple(pieces), tuple(after))

    def _cut(self, slab: int, free: _Free, length: int) -> Piece:
        piece = Piece(slab, free.start, length)
        free.start += length
        free.length -= length
        if not free.length:
            self._free[slab].remove(free)
        return piece

    def _take_back(self) -> None:
        touched = set()
        while self._returned:
            pieces, after = self._returned.popleft()
            for piece in pieces:
                self._free[piece.slab].append(_Free(piece.start, piece.length, (after,)))
                self.used_bytes -= piece.length
                touched.add(piece.slab)
        for slab, ranges in enumerate(self._free):
            for free in ranges:
                free.after = tuple(e for e in free.after if not self._transport.happened(e))
            if slab in touched:
                self._free[slab] = _joined(ranges)


def _joined(ranges: Sequence[_Free]) -> list[_Free]:
    """Neighbouring free ranges made one; sorted by start."""
    joined: list[_Free] = []
    for free in sorted(ranges, key=lambda free: free.start):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.length == free.start:
            last.length += free.length
            last.after += free.after
        else:
            joined.append(free)
    return joined
