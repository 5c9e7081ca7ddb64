# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Files of records in every form that is read, and a tokenizer of Megatron's without a download."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

FIRST_BYTE = 8
"""Ids below are special; byte b is FIRST_BYTE + b."""
EOD = 2


def byte_vocabulary(folder: Path) -> str:
    """A vocabulary file of tiktoken's with one entry for each byte."""
    entries = [
        {"rank": b, "token_bytes": base64.b64encode(bytes([b])).decode(), "token_str": chr(b)}
        for b in range(256)
    ]
    path = folder / "bytes.json"
    path.write_text(json.dumps(entries))
    return str(path)


def byte_tokenizer(folder: Path):
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        byte_vocabulary(folder),
        metadata_path={"library": "tiktoken"},
        vocab_size=256 + FIRST_BYTE,
        num_special_tokens=FIRST_BYTE,
    )


def ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def write(path: Path, records: list) -> str:
    """Records to a file of the form that its suffix says; a str is a line as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    content = "".join(f"{line}\n" for line in lines).encode()
    if path.name.endswith(".jsonl"):
        path.write_bytes(content)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(content))
    elif path.name.endswith(".jsonl.zst"):
        import pyarrow

        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(content)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(records)
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:  # as Hugging Face's save_to_disk leaves it
        _save_to_disk(path, records)
    return str(path)


def _save_to_disk(path: Path, records: list) -> None:
    import pyarrow

    path.mkdir()
    files = []
    for at, part in enumerate((records[::2], records[1::2])):
        table = pyarrow.Table.from_pylist(part)
        files.append({"filename": f"data-{at:05d}-of-00002.arrow"})
        file = str(path / files[-1]["filename"])
        with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=5)
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (path / "dataset_info.json").write_text("{}")
