# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Files of records, and the shards that they are read in.

A shard is what one process tokenises at a time: a byte range of a plain .jsonl, a whole compressed
one (it can only be read from its start), some row groups of a .parquet, one Arrow file of a Hugging
Face dataset. Which shards a file has depends on the file alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.data.errors import CorpusError

SHARD_BYTES = 64 << 20
"""About how much of a file is tokenised at a time; a compressed file counts as one shard."""

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (*JSON_LINES, ".parquet")
_NEED_PYARROW = (".jsonl.zst", ".parquet", "arrow")


@dataclass(frozen=True)
class Shard:
    """One part of one file."""

    path: str
    kind: str
    """A suffix of SUFFIXES, or "arrow"."""
    start: int
    stop: int
    """Bytes of a .jsonl (a line belongs to where it begins), .parquet's row groups; else 0, 0."""

    def __str__(self) -> str:
        return self.path if self.kind == "arrow" or not self.stop else (
            f"{self.path} [{self.start}:{self.stop}]"
        )  # fmt: skip


def is_text_path(path: str) -> bool:
    """Whether a `--data-path` entry is records of text, not an IndexedDataset's prefix."""
    return _suffix(path) is not None or (os.path.isdir(path) and not os.path.isfile(f"{path}.idx"))


def list_shards(path: str, shard_bytes: int | None = None) -> list[Shard]:
    """The shards of a file, of a Hugging Face dataset's folder, or of a folder of such files.

    Raises:
        CorpusError: nothing to read there, or a library that reads it is missing.
    """
    shards = _shards(path, shard_bytes or SHARD_BYTES)
    if not shards:
        raise CorpusError(f"--data-path {path} holds no record: leave it out, or fill it.")
    return shards


def _shards(path: str, size: int) -> list[Shard]:
    if os.path.isdir(path):
        return _folder(path, size)
    kind = _suffix(path)
    if kind is None or not os.path.isfile(path):
        raise CorpusError(f"--data-path {path}: there is no such file; check the path.")
    _require(kind, path)
    return _file(path, kind, size)


def _suffix(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), None)


def _folder(path: str, size: int) -> list[Shard]:
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise CorpusError(
            f"--data-path {path} holds several splits: give one of them, as {path}/{splits[0]}."
        )
    if (folder / "state.json").is_file():
        return _saved_dataset(folder)
    files = sorted(str(entry) for entry in folder.iterdir() if _suffix(entry.name) is not None)
    if not files:
        raise CorpusError(
            f"--data-path {path}: this folder holds no {', '.join(SUFFIXES)} file and is no "
            f"Hugging Face dataset (save_to_disk): give a file, or a folder of files."
        )
    return [shard for file in files for shard in _shards(file, size)]


def _saved_dataset(folder: Path) -> list[Shard]:
    """A Hugging Face dataset as `save_to_disk` leaves it: Arrow streams, named in state.json."""
    _require("arrow", str(folder))
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):
        raise CorpusError(
            f"--data-path {folder}: this dataset is a selection of its files: save it again after "
            f"flatten_indices()."
        )
    return [Shard(str(folder / file["filename"]), "arrow", 0, 0) for file in state["_data_files"]]


def _file(path: str, kind: str, size: int) -> list[Shard]:
    if kind == ".jsonl":
        end = os.path.getsize(path)
        return [Shard(path, kind, at, min(at + size, end)) for at in range(0, end, size)]
    if kind != ".parquet":
        return [Shard(path, kind, 0, 0)]
    import pyarrow.parquet

    try:
        meta = pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError) as error:
        raise CorpusError(f"--data-path {path} is no parquet file, or a truncated one: {error}.") \
            from error  # fmt: skip
    shards, start, held = [], 0, 0
    for group in range(meta.num_row_groups):
        held += meta.row_group(group).total_byte_size
        if held >= size or group == meta.num_row_groups - 1:
            shards.append(Shard(path, kind, start, group + 1))
            start, held = group + 1, 0
    return shards


def _require(kind: str, path: str) -> None:
    if kind in _NEED_PYARROW and importlib.util.find_spec("pyarrow") is None:
        raise CorpusError(f"--data-path {path} needs pyarrow to be read: pip install pyarrow.")
