# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokens of an IndexedDataset, such that files which change under a run end in an error.

Megatron maps the .bin: past the end of a file that was cut short since, or where its storage
fails, touching a mapped page kills the process (SIGBUS) before it can name the file. Without
mapping it takes whatever was in memory for tokens that did not come. So tokens are read here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from io import FileIO
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError

logger = logging.getLogger(__name__)

_PAUSES_S = (1.0, 5.0, 20.0)
"""Before a read that failed is tried again."""


class TokenFile:
    """Reads slices of documents.

    Args:
        dataset: Megatron's; one that has no file on this machine (mock, object storage) is asked
            itself.
        again: how to get the files again; ends messages.
    """

    def __init__(self, dataset: Any, again: str = "copy or build it again") -> None:
        self._dataset, self._again = dataset, again
        self.path = str(getattr(dataset, "path_prefix", "the corpus"))
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_again": self._again, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _prepare(self) -> None:
        # What derives from IndexedDataset may read in a way of its own.
        self._is_read_here = type(self._dataset) is IndexedDataset and os.path.isfile(
            get_bin_path(self.path)
        )
        self._file: FileIO | None = None
        self._opening = threading.Lock()
        if self._is_read_here:
            self._idx_bytes = self._mapped_idx_bytes()

    def _opened(self, *, again: bool = False) -> FileIO:
        """The .bin, opened by the first who reads, since some ranks only ask for lengths."""
        with self._opening:
            if self._file is None or again:
                self._file = FileIO(get_bin_path(self.path))
            return self._file

    def get(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        """Tokens offset .. offset+length-1 of a document.

        Raises:
            CorpusError: the files do not give them.
        """
        self.check_index()
        try:
            tokens = self._read(document, offset, length)
        except (OSError, ValueError) as error:
            raise self._unreadable(document, str(error)) from error
        if len(tokens) != length:
            raise self._unreadable(document, f"{len(tokens)} tokens came instead of {length}")
        return tokens

    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of the documents, in memory."""
        return np.array(self._dataset.sequence_lengths, np.int64)

    def check_index(self) -> None:
        """Lengths are taken from the mapped .idx; this costs microseconds.

        Raises:
            CorpusError: it is shorter than it was.
        """
        if self._is_read_here and (size := self._mapped_idx_bytes()) < self._idx_bytes:
            raise CorpusError(
                f"--data-path {self.path}: {get_idx_path(self.path)} has {size} bytes where it had "
                f"{self._idx_bytes}: it was truncated under the run; {self._again}."
            )

    def _mapped_idx_bytes(self) -> int:
        """Of the file that is mapped, whatever its path leads to by now."""
        return int(self._dataset.index.bin_buffer_mmap._mmap.size())

    def _read(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        if not self._is_read_here:
            tokens: NDArray[np.integer] = self._dataset.get(document, offset=offset, length=length)
            return tokens
        index = self._dataset.index
        dtype = np.dtype(index.dtype)
        begin = int(index.sequence_pointers[document]) + offset * dtype.itemsize
        data = self._bytes(begin, length * dtype.itemsize)
        return np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)

    def _bytes(self, begin: int, count: int) -> bytes:
        """Fewer where the file ends before."""
        parts: list[bytes] = []
        while count and (part := self._part(begin, count)):
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, begin: int, count: int) -> bytes:
        """Tries again where storage fails for a while, as Megatron does for files not mapped."""
        for pause in _PAUSES_S:
            try:
                return os.pread(self._opened().fileno(), count, begin)
            except OSError as error:
                logger.warning("hdp: %s.bin: %s; read again in %.0f s", self.path, error, pause)
                time.sleep(pause)
                with suppress(OSError):
                    self._opened(again=True)
        return os.pread(self._opened().fileno(), count, begin)

    def _unreadable(self, document: int, reason: str) -> CorpusError:
        return CorpusError(
            f"--data-path {self.path}: document {document} cannot be read from {self.path}.bin "
            f"({reason}): it was truncated, or its storage fails; {self._again}."
        )
