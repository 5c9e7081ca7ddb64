# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Packs of whole sequences out of tokenised shards, one shard after another.

Epoch e walks the shards, and each shard's documents, in orders that depend on (seed, epoch, shard)
alone. Packs are filled greedily; one that a shard's end leaves open is filled from the next shard,
so what is carried over is told by where the pack begins: a cursor (epoch, shard's turn, offset).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.long_documents import Pieces, cut_or_drop
from megatron_hdp.data.packing import epoch_order
from megatron_hdp.data.sources import PackSource, Piece
from megatron_hdp.data.streams.ahead import TokeniseAhead
from megatron_hdp.data.streams.store import Tokenised, TokenStore

logger = logging.getLogger(__name__)

_SPLIT_SEED = 0x5EED
"""Which split a document belongs to must not change with --seed."""
_OPEN_SHARDS = 4
_KEPT_PACKS = 4096


class Cursor(NamedTuple):
    """Where a pack begins."""

    epoch: int
    turn: int
    """How many shards of the epoch came before."""
    offset: int
    """How many pieces of that shard came before."""


class _Turn(NamedTuple):
    """One shard's pieces in reading order."""

    shard: int
    pieces: Pieces
    ends: NDArray[np.int64]
    """[n] tokens up to and with each piece."""


class TextSource(PackSource):
    """A pack source over a token store.

    Args:
        store: the shards.
        context_length: tokens of a pack at most.
        seed: of the orders.
        share: documents whose number in [0, 1), a hash of their place, lies in it belong here.
        long_documents: "fail", "cut" or "drop" for those longer than the context.
        num_packs: what `len` says; there is no end, epochs repeat.
        eod_mask_loss: no loss where the token is an end of document (Megatron's option).
        ahead: told the shards whose turns come next.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        context_length: int,
        seed: int,
        num_packs: int,
        share: tuple[float, float] = (0.0, 1.0),
        long_documents: str = "fail",
        eod_mask_loss: bool = False,
        ahead: TokeniseAhead | None = None,
    ) -> None:
        self._store = store
        self._context = context_length
        self._seed = seed
        self._share = share
        self._long_documents = long_documents
        self._num_packs = num_packs
        self._eod = store.encoder.tokenizer.eod if eod_mask_loss else None
        self._ahead = ahead
        self._lock = threading.RLock()
        self._first = 0
        self._cursors = array("q", (0, 0, 0))
        """Of packs _first, _first + 1, ...: three numbers each, the last one's pack is not made."""
        self._told: set[int] = set()
        self._make_caches()
        text = f"{store.fingerprint} {context_length} {seed} {share} {long_documents}"
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _make_caches(self) -> None:
        self._turn = functools.lru_cache(_OPEN_SHARDS)(self._make_turn)
        self._open = functools.lru_cache(_OPEN_SHARDS)(self._store.open)
        self._pack = functools.lru_cache(_KEPT_PACKS)(self._make_pack)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that reads for others; it tokenises what it needs itself."""
        own = {"_lock", "_turn", "_open", "_pack"}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"_ahead": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self._make_caches()

    def __len__(self) -> int:
        return self._num_packs

    def lengths(self, pack: int) -> NDArray[np.int64]:
        return self._rows(pack)[3]

    def document(self, pack: int, position: int) -> int:
        shard, document, _, _ = self._rows(pack)[:, position]
        return int(shard) << 32 | int(document)

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        shard, document, first, _ = map(int, self._rows(pack)[:, position])
        with self._lock:
            tokenised = self._open(shard)
        begin, length = first + start, int(tokenised.lengths[document])
        # Behind a cut the document goes on, so its last token has a target there.
        last = min(first + stop + 1, length)
        assert tokenised.tokens is not None
        text = tokenised.tokens.get(document, offset=begin, length=last - begin).astype(np.int64)
        labels = np.zeros(stop - start, np.int64)
        labels[: last - begin - 1] = text[1:]
        loss_mask = np.zeros(stop - start, np.float32)
        loss_mask[: last - begin - 1] = _answers(tokenised, document, begin, last)[1:]
        tokens = text[: stop - start]
        if self._eod is not None:
            loss_mask[tokens == self._eod] = 0.0
        return Piece(tokens, labels, loss_mask)

    def state(self, pack: int) -> dict[str, Any]:
        with self._lock:
            return {
                "pack": pack,
                "cursor": list(self._cursor(pack)),
                "fingerprint": self.fingerprint,
            }

    def restore(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise CorpusError(
                "the checkpoint's data state belongs to other files, another tokenizer, --seed, "
                "--seq-length, --split or --hdp-long-documents: give those that the saving run had."
            )
        with self._lock:
            self._first, self._cursors = state["pack"], array("q", state["cursor"])
            self._pack.cache_clear()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _rows(self, pack: int) -> NDArray[np.int64]:
        """[4, n] shard, document, first token and tokens of the pack's sequences."""
        with self._lock:
            rows: NDArray[np.int64] = self._pack(pack)[0]
            return rows

    def _cursor(self, pack: int) -> Cursor:
        if pack < self._first:
            raise CorpusError(f"pack {pack} comes before the restored {self._first}.")
        while len(self._cursors) < 3 * (pack - self._first + 1):
            _, following = self._fill(Cursor(*self._cursors[-3:]))
            self._cursors.extend(following)
        at = 3 * (pack - self._first)
        return Cursor(*self._cursors[at : at + 3])

    def _make_pack(self, pack: int) -> tuple[NDArray[np.int64], Cursor]:
        rows, following = self._fill(self._cursor(pack))
        if len(self._cursors) == 3 * (pack - self._first + 1):
            self._cursors.extend(following)
        return rows, following

    def _fill(self, cursor: Cursor) -> tuple[NDArray[np.int64], Cursor]:
        """The pack that begins at the cursor, and where the next one begins."""
        epoch, number, offset = cursor
        parts, room, empty_epochs = [], self._context, 0
        while True:
            turn = self._turn(epoch, number)
            before = int(turn.ends[offset - 1]) if offset else 0
            stop = int(np.searchsorted(turn.ends, before + room, side="right"))
            if stop > offset:
                room -= int(turn.ends[stop - 1]) - before
                pieces = turn.pieces
                shard = np.full(stop - offset, turn.shard, np.int64)
                columns = pieces.document, pieces.start, pieces.length
                parts.append(np.stack([shard, *(column[offset:stop] for column in columns)]))
            if stop < len(turn.ends):
                return np.concatenate(parts, axis=1), Cursor(epoch, number, stop)
            number, offset = number + 1, 0
            if number == len(self._store.shards):
                epoch, number = epoch + 1, 0
                if parts:
                    return np.concatenate(parts, axis=1), Cursor(epoch, number, offset)
                empty_epochs += 1
                if empty_epochs == 2:
                    raise CorpusError(
                        f"--data-path {self._store.shards[0].path}: no document of it belongs to "
                        f"this split: give it more documents, or another --split."
                    )

    def _make_turn(self, epoch: int, number: int) -> _Turn:
        order = epoch_order(len(self._store.shards), self._seed, epoch)
        shard = int(order[number])
        pieces = self._pieces(shard)
        if self._ahead is not None:
            self._ahead([int(following) for following in order[number + 1 : number + 3]])
        state = np.random.RandomState(
            np.random.MT19937(np.random.SeedSequence([self._seed, epoch, shard + 1]))
        )
        shuffled = pieces.take(state.permutation(len(pieces.length)))
        return _Turn(shard, shuffled, np.cumsum(shuffled.length))

    def _pieces(self, shard: int) -> Pieces:
        lengths = self._open(shard).lengths
        numbers = np.random.RandomState(
            np.random.MT19937(np.random.SeedSequence([_SPLIT_SEED, shard]))
        ).random_sample(len(lengths))
        low, high = self._share
        own = np.flatnonzero((numbers >= low) & (numbers < high))
        pieces, count = cut_or_drop(
            own, lengths[own], self._context, self._long_documents, str(self._store.shards[shard])
        )
        if count and shard not in self._told:
            self._told.add(shard)
            logger.warning(
                "hdp: %s: %d documents longer than --seq-length %d: %s",
                self._store.shards[shard], count, self._context, self._long_documents,
            )  # fmt: skip
        return pieces


def _answers(tokenised: Tokenised, document: int, begin: int, last: int) -> NDArray[np.float32]:
    if tokenised.answers is None:
        return np.ones(last - begin, np.float32)
    part = tokenised.answers.get(document, offset=begin, length=last - begin)
    return part.astype(np.float32)
