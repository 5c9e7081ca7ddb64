# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Blends that keep their weights in tokens.

Megatron's blend keeps weights in samples, which all hold the same number of tokens. Packs of whole
documents do not: a source of long documents fills them less, and would get less than its share.
Here the next pack comes from the source that is furthest behind its share of tokens.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.sources import PackSource, Piece


class TokenBlend(PackSource):
    """A blend of pack sources that need not know their packs ahead.

    Args:
        parts: the sources.
        weights: [parts] positive shares of tokens.
        num_packs: what `len` says.
    """

    def __init__(self, parts: list[PackSource], weights: list[float], num_packs: int) -> None:
        self._parts = parts
        self._weights = np.asarray(weights, np.float64) / sum(weights)
        self._num_packs = num_packs
        self._lock = threading.RLock()
        self._first = 0
        self._chosen, self._index = array("q"), array("q")
        """Part and pack of it, of packs _first, _first + 1, ..."""
        self._served = np.zeros(len(parts), np.int64)
        """Tokens and, below, packs that each part gave to all packs so far."""
        self._counts = np.zeros(len(parts), np.int64)
        text = "".join(part.fingerprint for part in parts) + repr(list(self._weights))
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return self._num_packs

    def lengths(self, pack: int) -> NDArray[np.int64]:
        part, index = self._locate(pack)
        return part.lengths(index)

    def document(self, pack: int, position: int) -> int:
        part, index = self._locate(pack)
        return part.document(index, position)

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        part, index = self._locate(pack)
        return part.read(index, position, start, stop)

    def state(self, pack: int) -> dict[str, Any]:
        """Small: a number or two for each part, and the parts' own states."""
        with self._lock:
            if pack > self._first:
                self._locate(pack - 1)
            counts, served = self._counts.copy(), self._served.copy()
            for at in range(pack - self._first, len(self._chosen)):  # handed out ahead
                part, index = self._chosen[at], self._index[at]
                counts[part] -= 1
                served[part] -= int(self._parts[part].lengths(index).sum())
            states = [
                part.state(int(count)) for part, count in zip(self._parts, counts, strict=True)
            ]
            return {
                "pack": pack,
                "fingerprint": self.fingerprint,
                "served": served.tolist(),
                "counts": counts.tolist(),
                "parts": states,
            }

    def restore(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise CorpusError(
                "the checkpoint's data state belongs to another blend: give --data-path, --seed, "
                "--seq-length, --split and --hdp-long-documents of the run that saved it."
            )
        with self._lock:
            self._first = state["pack"]
            self._chosen, self._index = array("q"), array("q")
            self._served = np.array(state["served"], np.int64)
            self._counts = np.array(state["counts"], np.int64)
            for part, own in zip(self._parts, state["parts"], strict=True):
                if own is not None:
                    part.restore(own)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _locate(self, pack: int) -> tuple[PackSource, int]:
        with self._lock:
            if pack < self._first:
                raise CorpusError(f"pack {pack} comes before the restored {self._first}.")
            while len(self._chosen) <= pack - self._first:
                part = int(np.argmin(self._served / self._weights))
                index = int(self._counts[part])
                self._chosen.append(part)
                self._index.append(index)
                self._counts[part] += 1
                self._served[part] += int(self._parts[part].lengths(index).sum())
            at = pack - self._first
            return self._parts[self._chosen[at]], self._index[at]
