# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The server: reads slices and tells lengths. It keeps nothing, so that any server can stand in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from megatron_hdp.data.piece import Piece, join
from megatron_hdp.data.remote.notices import Notices
from megatron_hdp.data.remote.shipping import unpack

if TYPE_CHECKING:
    from megatron_hdp.data.sources import PackSource


class RoleStatus(NamedTuple):
    """What one process of the loader is and has done."""

    name: str
    node: str
    pid: int
    memory_bytes: int
    """Resident, what it shares with others left out."""
    cpu_s: float
    calls: int
    tokens: int


def own_memory_bytes() -> int:
    """Resident memory of this process that no other one shares."""
    return int(psutil.Process().memory_full_info().uss)


class Server:
    """One process that serves every stream; calls may come on several threads.

    Args:
        number: this server's.
        sources: a dict of PackSource by stream name, made by `shipping.pack`.
        folder: where relative paths count from.
        readers: slices read at once, so that the latency of remote storage is paid once.
    """

    def __init__(self, number: int, sources: bytes, folder: str, readers: int) -> None:
        self._name = f"server {number}"
        self._sent = sources, folder
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="hdp read")
        self._notices = Notices()
        self._calls = self._tokens = 0

    @cached_property
    def _sources(self) -> dict[str, PackSource]:
        # Not in __init__: there an error would end the actor instead of its caller's question.
        return unpack(*self._sent)

    def open(self) -> None:
        """Opens the sources.

        Raises:
            CorpusError: a file is not to be seen from this server's node.
        """
        _ = self._sources

    def lengths(
        self, stream: str, first: int, count: int
    ) -> tuple[list[NDArray[np.int64]], list[str]]:
        """Tokens of the sequences of packs first .. first+count-1, for which no token is read, and
        what this server has to say so far.
        """
        self._calls += 1
        found = [self._sources[stream].lengths(first + i) for i in range(count)]
        return found, self._notices.all()

    def read(self, stream: str, pieces: Sequence[tuple[int, int, int]]) -> Piece:
        """The given (sequence id, start, stop), joined in their order.

        Raises:
            CorpusError: a file cannot be read.
        """
        source = self._sources[stream]
        piece = join(list(self._pool.map(lambda p: source.read_sequence(*p), pieces)))
        self._calls += 1
        self._tokens += len(piece.tokens)
        return piece

    def status(self) -> RoleStatus:
        """Costs a look at the process's page tables."""
        process = psutil.Process()
        times = process.cpu_times()
        return RoleStatus(
            self._name, os.uname().nodename, process.pid, own_memory_bytes(),
            times.user + times.system, self._calls, self._tokens,
        )  # fmt: skip
