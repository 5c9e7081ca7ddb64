# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokens of an IndexedDataset, such that files which change under a run end in an error.

Megatron maps the .bin: past the end of a file that was cut short since, or where its storage
fails, touching a mapped page kills the process (SIGBUS) before it can name the file. Without
mapping it takes whatever was in memory for tokens that did not come. So tokens are read here.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError


class TokenFile:
    """Reads slices of documents.

    Args:
        dataset: Megatron's; one that has no file on this machine (mock, object storage) is asked
            itself.
        again: how to get the files again; ends messages.

    Raises:
        CorpusError: the files cannot be opened.
    """

    def __init__(self, dataset: Any, again: str = "copy or build it again") -> None:
        self._dataset, self._again = dataset, again
        self.path = str(getattr(dataset, "path_prefix", "the corpus"))
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "_again": self._again, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        bin_, self._idx = get_bin_path(self.path), get_idx_path(self.path)
        self._file = None
        if isinstance(self._dataset, IndexedDataset) and os.path.isfile(bin_):
            try:
                self._file = open(bin_, "rb", buffering=0)  # noqa: SIM115 - for the object's life
                self._idx_bytes = os.path.getsize(self._idx)
            except OSError as error:
                raise CorpusError(f"--data-path {self.path}: {error}.") from error

    def get(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        """Tokens offset .. offset+length-1 of a document.

        Raises:
            CorpusError: the files do not give them.
        """
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
        if self._file is None:
            return
        try:
            size = os.stat(self._idx).st_size
        except OSError as error:
            raise CorpusError(f"--data-path {self.path}: {error}.") from error
        if size < self._idx_bytes:
            raise CorpusError(
                f"--data-path {self.path}: {self._idx} has {size} bytes where it had "
                f"{self._idx_bytes}: it was truncated under the run; {self._again}."
            )

    def _read(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        if self._file is None:
            tokens: NDArray[np.integer] = self._dataset.get(document, offset=offset, length=length)
            return tokens
        self.check_index()
        index = self._dataset.index
        dtype = np.dtype(index.dtype)
        begin = int(index.sequence_pointers[document]) + offset * dtype.itemsize
        data = self._bytes(begin, length * dtype.itemsize)
        return np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)

    def _bytes(self, begin: int, count: int) -> bytes:
        """Fewer where the file ends before."""
        assert self._file is not None
        parts: list[bytes] = []
        while count and (part := os.pread(self._file.fileno(), count, begin)):
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _unreadable(self, document: int, reason: str) -> CorpusError:
        return CorpusError(
            f"--data-path {self.path}: document {document} cannot be read from {self.path}.bin "
            f"({reason}): it was truncated, or its storage fails; {self._again}."
        )
