# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The loader without helpers: lengths from the index, tokens from this host's files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.batch import Batch, fill_batch
from megatron_hdp.data.loading.loader import Loaded, Loader, Share
from megatron_hdp.data.piece import Piece
from megatron_hdp.data.requests import Steps
from megatron_hdp.data.sources import PackSource
from megatron_hdp.planning.values import Plan


class Planner(Protocol):
    """Anything that gives step k's plan; all ranks must get the same."""

    def get(self, step: int) -> Plan: ...

    def close(self) -> None: ...


class LocalLoader(Loader):
    """Reads through the page cache, in the thread that asks."""

    def __init__(self, source: PackSource, planner: Planner, steps: Steps) -> None:
        super().__init__(source, steps)
        self._planner = planner

    def plan(self, step: int) -> Plan:
        return self._planner.get(step)

    def read(self, step: int, shares: Sequence[Share]) -> Loaded:
        begun, read = time.perf_counter(), _Count()
        batches = tuple(
            read_batch(self._source, share.pieces, share.positions, read) for share in shares
        )
        return Loaded(batches, read.tokens, read.bytes, begun, time.perf_counter())

    def close(self) -> None:
        self._planner.close()
        self._source.close()


class _Count:
    """What was read so far."""

    def __init__(self) -> None:
        self.tokens = self.bytes = 0

    def add(self, piece: Piece) -> Piece:
        self.tokens += len(piece.tokens)
        self.bytes += piece.nbytes
        return piece


def read_batch(
    source: PackSource,
    pieces: Iterable[tuple[int, int, int]],
    positions: NDArray[np.int64],
    count: _Count,
) -> Batch:
    """One micro-batch of this rank, as `fill_batch` lays it out."""
    return fill_batch((count.add(source.read_sequence(*piece)) for piece in pieces), positions)
