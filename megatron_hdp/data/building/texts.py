# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Documents in folders and jsonl files, read when they are asked for.

Their order depends on names alone, so that the same files give the same corpus everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError


class Source(Protocol):
    """Documents by number."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> str | None:
        """The document's text; None when it is not text."""


class Folder:
    """The files under a folder whose names match; hidden files and folders are passed over."""

    def __init__(self, path: Path, pattern: str) -> None:
        self._files = sorted(
            file
            for file in path.rglob(pattern)
            if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
        )

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> str | None:
        try:
            return self._files[index].read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return None


class JsonLines:
    """One JSON object a line, the text under one key. Empty lines are passed over."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._file = path.open("rb")
        starts, numbers, at = [], [], 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                starts.append(at)
                numbers.append(number)
            at += len(line)
        self._starts, self._numbers = np.array(starts, np.int64), np.array(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> str:
        self._file.seek(int(self._starts[index]))
        try:
            text = json.loads(self._file.readline())[self._key]
        except (ValueError, KeyError, TypeError, IndexError):
            text = None
        if not isinstance(text, str):
            raise CorpusError(
                f"--input {self._path}: line {self._numbers[index]} is no JSON object with a text "
                f"under {self._key!r}: mend it, or name the field with --json-key."
            )
        return text


class Texts:
    """The documents of several sources, in order; each iteration reads them anew.

    Iterating passes over what is blank or not UTF-8.
    """

    def __init__(self, sources: Sequence[Source], chosen: NDArray[np.int64] | None = None) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])
        self._chosen = np.arange(self._ends[-1]) if chosen is None else chosen

    def __len__(self) -> int:
        """How many documents there are to read, blank ones included."""
        return len(self._chosen)

    def __iter__(self) -> Iterator[str]:
        for index in self._chosen:
            text = self._read(int(index))
            if text is not None:
                yield text

    def _read(self, index: int) -> str | None:
        source = int(np.searchsorted(self._ends, index, side="right"))
        text = self._sources[source].read(index - int(self._ends[source]))
        return text if text and not text.isspace() else None

    def sampled(self, count: int, seed: int) -> Texts:
        """At most `count` documents with text, chosen by `seed`, in their old order."""
        kept: list[int] = []
        for index in np.random.RandomState(seed).permutation(self._chosen):
            if len(kept) == count:
                break
            if self._read(int(index)) is not None:
                kept.append(int(index))
        return Texts(self._sources, np.array(sorted(kept), np.int64))


def open_texts(inputs: Sequence[str], pattern: str, json_key: str) -> Texts:
    """The documents of folders and .jsonl files.

    Raises:
        CorpusError: an input is neither.
    """
    sources: list[Source] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            sources.append(Folder(path, pattern))
        elif path.suffix == ".jsonl" and path.is_file():
            sources.append(JsonLines(path, json_key))
        else:
            raise CorpusError(f"--input {path}: give a folder or an existing .jsonl file.")
    return Texts(sources)
