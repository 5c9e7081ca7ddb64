# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The records of a shard, in order: dictionaries, or what says where one is malformed."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, cast

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.streams.files import Shard
from megatron_hdp.data.streams.json_columns import Decode, decoder_of

_ROWS = 256


@dataclass(frozen=True)
class BadRecord:
    """A record that is none."""

    place: str
    reason: str


def read_records(shard: Shard) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    """(place, record) of a shard; the place is for messages ("line 7", "row 7").

    Raises:
        CorpusError: the file cannot be read to its end.
    """
    try:
        if shard.kind == ".jsonl":
            yield from _range_of_lines(shard)
        elif shard.kind in (".jsonl.gz", ".jsonl.zst"):
            yield from _compressed_lines(shard)
        else:
            yield from _rows(shard)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise CorpusError(
            f"--data-path {shard.path} cannot be read to its end, it may be truncated "
            f"({type(error).__name__}: {error}): copy it again, or leave it out."
        ) from error


def _range_of_lines(shard: Shard) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    """Lines that begin in the range; the last one may end behind it."""
    with open(shard.path, "rb") as stream:
        if shard.start:
            stream.seek(shard.start - 1)
            stream.readline()  # begins before the range, or is the end of the line before
        while (at := stream.tell()) < shard.stop:
            place = f"byte {at}"
            line = stream.readline()
            if line.strip():
                yield place, _parsed(line, place)


def _compressed_lines(shard: Shard) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    with ExitStack() as stack:
        for number, line in enumerate(_opened(shard, stack), 1):
            if line.strip():
                yield f"line {number}", _parsed(line, f"line {number}")


def _opened(shard: Shard, stack: ExitStack) -> IO[bytes]:
    if shard.kind == ".jsonl.gz":
        return cast("IO[bytes]", stack.enter_context(gzip.open(shard.path, "rb")))
    import pyarrow

    # Unlike zstandard's own reader, it tells a stream that was cut off from one that ended.
    stream = stack.enter_context(pyarrow.input_stream(shard.path, compression="zstd"))
    return cast("IO[bytes]", stack.enter_context(io.BufferedReader(stream)))


def _rows(shard: Shard) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    with ExitStack() as stack:
        number = 0
        for batch in _row_batches(shard, stack):
            decode = decoder_of(batch.schema)
            for row in batch.to_pylist():
                number += 1
                place = f"row {number}"
                yield place, _decoded(row, decode, place) if decode else row


def _decoded(row: dict[str, Any], decode: Decode, place: str) -> dict[str, Any] | BadRecord:
    try:
        return cast("dict[str, Any]", decode(row))
    except ValueError as error:
        return BadRecord(place, f"no JSON in a column that should hold it: {error}")


def _row_batches(shard: Shard, stack: ExitStack) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if shard.kind == ".parquet":
        file = stack.enter_context(pyarrow.parquet.ParquetFile(shard.path))
        yield from file.iter_batches(_ROWS, row_groups=list(range(shard.start, shard.stop)))
        return
    stream = stack.enter_context(pyarrow.memory_map(shard.path))
    for batch in pyarrow.ipc.open_stream(stream):
        for at in range(0, batch.num_rows, _ROWS):
            yield batch.slice(at, _ROWS)


def _parsed(line: bytes, place: str) -> dict[str, Any] | BadRecord:
    try:
        record = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        return BadRecord(place, f"no JSON: {error}")
    if not isinstance(record, dict):
        return BadRecord(place, f"a JSON {type(record).__name__}, no object")
    return record
