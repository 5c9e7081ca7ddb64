# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Checks of a corpus on disk that cost no token: both files there, header right, .bin whole.

They run at argument validation, so that a bad path ends in one sentence before any process group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    get_bin_path,
    get_idx_path,
    is_object_storage_path,
)
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.streams.files import is_text_path, list_shards

_FINGERPRINT_BYTES = 1 << 20


def corpus_lengths(prefix: str) -> NDArray[np.int32]:
    """[n] tokens per sequence of an IndexedDataset, after checking that the .bin is whole.

    Raises:
        CorpusError: a file is missing, is no index, or is shorter than the index says.
    """
    idx, bin_ = get_idx_path(prefix), get_bin_path(prefix)
    for path in (idx, bin_):
        if not os.path.isfile(path):
            raise CorpusError(
                f"--data-path {prefix}: {path} does not exist; build it with tools/build_corpus.py "
                f"or give the prefix of an existing .idx/.bin pair."
            )
    try:
        dataset = IndexedDataset(prefix, multimodal=False, mmap=True)
    except (AssertionError, ValueError, KeyError, OSError) as error:
        raise CorpusError(
            f"--data-path {prefix}: {idx} is not a Megatron index ({error}); build it again."
        ) from error
    lengths = dataset.sequence_lengths
    expected = int(lengths.astype(np.int64).sum()) * int(dataset.index.dtype_size)
    actual = os.path.getsize(bin_)
    if actual < expected:
        raise CorpusError(
            f"--data-path {prefix}: {bin_} has {actual} bytes where its index needs {expected}; "
            f"it was truncated: copy or build it again."
        )
    # The index unmaps its file when the dataset goes, under any view of it.
    return np.array(lengths)


def check_corpora(prefixes: Iterable[str], context_length: int | None = None) -> None:
    """Raises CorpusError for the first entry that cannot be read; skips object storage.

    Of records of text only their files are looked at, since no length is known.

    Args:
        context_length: when given, every document must be at most this long.
    """
    for prefix in prefixes:
        if is_object_storage_path(prefix):
            continue
        if is_text_path(prefix):
            list_shards(prefix)
        else:
            lengths = corpus_lengths(prefix)
            if context_length is not None:
                check_lengths(lengths, context_length, prefix)


def check_lengths(lengths: NDArray[np.integer], context_length: int, corpus: str) -> None:
    """Raises CorpusError when a document is longer than the context, or all are empty."""
    longest = int(lengths.max(initial=0))
    if longest > context_length:
        count = int((lengths > context_length).sum())
        raise CorpusError(
            f"--seq-length {context_length} is shorter than {count} of {len(lengths)} documents "
            f"of --data-path {corpus} (the longest has {longest} tokens): raise --seq-length to "
            f"{longest}, or pass --hdp-long-documents cut or drop."
        )
    if longest == 0:
        raise CorpusError(f"--data-path {corpus} has no document with a token in this split.")


def data_prefixes(args: object) -> list[str]:
    """Corpus prefixes of every `--*data-path` and `--*data-args-path` argument, without weights.

    Raises:
        CorpusError: the list file cannot be read.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (OSError, ValueError, KeyError) as error:
        raise CorpusError(f"--data-args-path or --per-split-data-args-path: {error}") from error
    blends = [blend, *(per_split or [])]
    return [prefix for found in blends if found is not None for prefix in found[0]]


def fingerprint(dataset: IndexedDataset) -> str:
    """A hash of lengths and of both ends of the tokens: tells corpora apart, reads 2 MiB."""
    state = hashlib.blake2b(digest_size=16)
    lengths = np.ascontiguousarray(dataset.sequence_lengths)
    state.update(lengths.tobytes())
    prefix = getattr(dataset, "path_prefix", None)
    if prefix is not None and os.path.isfile(get_bin_path(prefix)):
        with open(get_bin_path(prefix), "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            for start in (0, max(0, size - _FINGERPRINT_BYTES)):
                stream.seek(start)
                state.update(stream.read(_FINGERPRINT_BYTES))
    return state.hexdigest()
