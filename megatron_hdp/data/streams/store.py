# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokenised shards on disk: whoever needs one first tokenises it, all others of the host read it.

A shard's tokens become an IndexedDataset beside the index caches of Megatron's datasets, the
answers of chats a second one, and a small JSON file, written last, says that both are whole. What
is there depends on the file and the tokenizer alone, so a crash, another domain size or another
host finds, or makes, the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.streams.encoding import Encoded, MalformedRecord, RecordEncoder
from megatron_hdp.data.streams.files import Shard
from megatron_hdp.data.streams.records import BadRecord, read_records
from megatron_hdp.data.token_file import TokenFile

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Raised when the same records would be written otherwise."""
_END_BYTES = 64 << 10
_POLL_S = 0.05


@dataclass(frozen=True)
class Tokenised:
    """One shard, tokenised."""

    lengths: NDArray[np.int64]
    """[n] tokens of its documents, each at least 1."""
    tokens: TokenFile | None
    """None: no document."""
    answers: TokenFile | None
    """1 where a token is to be predicted; None: all are."""
    malformed: int
    """Records left out."""


@dataclass
class _Summary:
    """What the JSON file holds."""

    documents: int = 0
    tokens: int = 0
    chats: int = 0
    malformed: int = 0
    first_malformed: list[str] = field(default_factory=list)


@dataclass
class TokenStore:
    """The tokenised shards of one `--data-path` entry.

    Args:
        shards: in the order that numbers them.
        encoder: makes sequences of records.
        folder: where tokenised shards are kept.
        skip_malformed: leave malformed records out and count them, instead of failing.
        timeout_s: how long `open` waits for another process that tokenises the shard.
    """

    shards: list[Shard]
    encoder: RecordEncoder
    folder: str
    skip_malformed: bool = False
    timeout_s: float = 600.0

    @property
    def fingerprint(self) -> str:
        """A hash of the files' ends and sizes and of the tokenizer: tells corpora apart."""
        state = hashlib.blake2b(self._tokenizer_text().encode(), digest_size=16)
        for path in dict.fromkeys(shard.path for shard in self.shards):
            state.update(_ends(path))
        return state.hexdigest()

    def open(self, index: int) -> Tokenised:
        """Shard `index`; tokenises it unless that is done or being done.

        Raises:
            CorpusError: the file cannot be read, or a record is malformed and not to be skipped.
            TimeoutError: another process did not finish it in time.
        """
        base, deadline = self._base(index), time.monotonic() + self.timeout_s
        while not _is_whole(base):
            with _lock(base) as held:
                if held and not _is_whole(base):
                    self._tokenise(self.shards[index], base)
            if not held:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"HDP waited {self.timeout_s:.0f} s for {_holder(base)} to tokenise "
                        f"{self.shards[index]}: raise --hdp-timeout-minutes, or end that process."
                    )
                time.sleep(_POLL_S)
        return _read(base)

    def try_ahead(self, index: int) -> bool:
        """Tokenises shard `index` if nobody has or does; whether it was this call that did."""
        base = self._base(index)
        if _is_whole(base):
            return False
        with _lock(base) as held:
            if not held or _is_whole(base):
                return False
            self._tokenise(self.shards[index], base)
        return True

    def _tokenizer_text(self) -> str:
        tokenizer = self.encoder.tokenizer
        known = json.dumps(getattr(tokenizer, "unique_identifiers", {}), default=str)
        return f"{_FORMAT} {known} {tokenizer.vocab_size} {self.encoder.text_key}"

    def _base(self, index: int) -> str:
        """Path, without suffix, of the shard's files. A file changed since has another one."""
        shard = self.shards[index]
        state = hashlib.blake2b(self._tokenizer_text().encode(), digest_size=12)
        state.update(f"{shard.kind} {shard.start} {shard.stop} {self.skip_malformed}".encode())
        state.update(f"{os.path.abspath(shard.path)} {os.stat(shard.path).st_mtime_ns}".encode())
        state.update(_ends(shard.path))
        return os.path.join(self.folder, f"{os.path.basename(shard.path)}-{state.hexdigest()}")

    def _tokenise(self, shard: Shard, base: str) -> None:
        summary = _Summary()
        writer = _Writer(base, int(self.encoder.tokenizer.vocab_size))
        try:
            for sequence in self._sequences(shard, summary):
                writer.add(sequence)
                summary.documents += 1
                summary.tokens += len(sequence.tokens)
                summary.chats += sequence.answers is not None
            writer.finish(with_answers=summary.chats > 0)
        finally:
            writer.discard()
        if summary.malformed:
            logger.warning(
                "hdp: %s: %d malformed records left out, the first at %s",
                shard, summary.malformed, "; ".join(summary.first_malformed),
            )  # fmt: skip
        with open(f"{base}.json.part", "w") as stream:
            json.dump(asdict(summary), stream)
        os.replace(f"{base}.json.part", f"{base}.json")

    def _sequences(self, shard: Shard, summary: _Summary) -> Iterator[Encoded]:
        for place, record in read_records(shard):
            try:
                if isinstance(record, BadRecord):
                    raise MalformedRecord(record.reason)
                yield from [found for found in self.encoder(record) if len(found.tokens)]
            except MalformedRecord as error:
                if not self.skip_malformed:
                    raise CorpusError(
                        f"--data-path {shard.path}, {place}: {error}: mend the record, or leave "
                        f"such records out with --hdp-malformed-records skip."
                    ) from error
                summary.malformed += 1
                if len(summary.first_malformed) < 3:
                    summary.first_malformed.append(f"{place} ({error})")


class _Writer:
    """The pair of IndexedDatasets of a shard; both appear only when whole."""

    def __init__(self, base: str, vocab_size: int) -> None:
        dtype: Any = DType.optimal_dtype(vocab_size)
        self._base = base
        self._tokens = IndexedDatasetBuilder(f"{base}.bin.part", dtype=dtype)
        self._answers = IndexedDatasetBuilder(f"{base}.answers.bin.part", dtype=np.uint8)

    def add(self, sequence: Encoded) -> None:
        answers = sequence.answers
        if answers is None:
            answers = np.ones(len(sequence.tokens), np.uint8)
        for builder, values in ((self._tokens, sequence.tokens), (self._answers, answers)):
            builder.add_item(torch.from_numpy(values))
            builder.end_document()

    def finish(self, *, with_answers: bool) -> None:
        self._tokens.finalize(f"{self._base}.idx.part")
        self._answers.finalize(f"{self._base}.answers.idx.part")
        for name in ("", ".answers") if with_answers else ("",):
            for kind in ("bin", "idx"):
                os.replace(f"{self._base}{name}.{kind}.part", f"{self._base}{name}.{kind}")

    def discard(self) -> None:
        """What was not renamed."""
        for builder in (self._tokens, self._answers):
            builder.data_file.close()
        for name in ("", ".answers"):
            for kind in ("bin", "idx"):
                with suppress(FileNotFoundError):
                    os.remove(f"{self._base}{name}.{kind}.part")


def _is_whole(base: str) -> bool:
    return os.path.isfile(f"{base}.json")


def _read(base: str) -> Tokenised:
    with open(f"{base}.json") as stream:
        summary = _Summary(**json.load(stream))
    if not summary.documents:
        return Tokenised(np.zeros(0, np.int64), None, None, summary.malformed)
    tokens = _file(base)
    answers = None
    if summary.chats:
        answers = _file(f"{base}.answers")
    return Tokenised(tokens.lengths(), tokens, answers, summary.malformed)


def _file(base: str) -> TokenFile:
    dataset = IndexedDataset(base, multimodal=False, mmap=True)
    return TokenFile(dataset, "remove it, and the next run makes it again")


@contextmanager
def _lock(base: str) -> Iterator[bool]:
    """Whether this process holds the shard's lock; it goes with the process that holds it."""
    os.makedirs(os.path.dirname(base), exist_ok=True)
    with open(f"{base}.lock", "a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} of {socket.gethostname()}")
        stream.flush()
        yield True


def _holder(base: str) -> str:
    with suppress(OSError), open(f"{base}.lock") as stream:
        return stream.read() or "another process"
    return "another process"


def _ends(path: str) -> bytes:
    """Size, first and last bytes of a file."""
    with open(path, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        first = stream.read(_END_BYTES)
        stream.seek(max(0, size - _END_BYTES))
        return f"{size} ".encode() + first + stream.read(_END_BYTES)
