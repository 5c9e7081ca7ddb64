# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Writes encoded documents through Megatron's own builder, one document a sequence."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from numpy.typing import NDArray

from megatron_hdp.data.building.encoders import Encoder
from megatron_hdp.data.errors import CorpusError

_BATCH = 256


@dataclass(frozen=True)
class Written:
    """What became of the documents."""

    lengths: NDArray[np.int64]
    """Tokens per document written, end of document included."""
    cut: int
    dropped: int


def write_corpus(
    texts: Iterable[str],
    encoder: Encoder,
    prefix: str,
    *,
    max_length: int | None = None,
    drop_long: bool = False,
) -> Written:
    """Writes PREFIX.bin and PREFIX.idx; both appear only when the whole corpus is written.

    Args:
        max_length: tokens per document, end of document included; longer ones are cut.
        drop_long: leave longer ones out instead.

    Raises:
        CorpusError: no document is left.
    """
    parts = {f"{prefix}.{kind}": f"{prefix}.{kind}.part" for kind in ("bin", "idx")}
    part_bin, part_idx = parts.values()
    try:
        dtype: Any = DType.optimal_dtype(encoder.vocab_size)
        builder = IndexedDatasetBuilder(part_bin, dtype=dtype)
        written = _write(texts, encoder, builder, max_length, drop_long)
        if not len(written.lengths):
            raise CorpusError(
                f"--max-length {max_length} drops all {written.dropped} documents: raise it, or "
                f"use --too-long cut."
            )
        builder.finalize(part_idx)
        with suppress(FileNotFoundError):
            os.remove(f"{prefix}.idx")  # an old index must never stand beside new tokens
        for final, part in parts.items():
            os.replace(part, final)
    finally:
        for part in parts.values():
            with suppress(FileNotFoundError):
                os.remove(part)
    return written


def _write(
    texts: Iterable[str],
    encoder: Encoder,
    builder: IndexedDatasetBuilder,
    max_length: int | None,
    drop_long: bool,
) -> Written:
    lengths: list[int] = []
    cut = dropped = 0
    for batch in itertools.batched(texts, _BATCH):
        for ids in encoder.encode(list(batch)):
            if max_length is not None and len(ids) + 1 > max_length:
                if drop_long:
                    dropped += 1
                    continue
                cut += 1
                ids = ids[: max_length - 1]
            builder.add_item(torch.tensor([*ids, encoder.eod]))
            builder.end_document()
            lengths.append(len(ids) + 1)
    return Written(np.array(lengths, np.int64), cut, dropped)
