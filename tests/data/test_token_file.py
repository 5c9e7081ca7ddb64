# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Tokens are Megatron's own, and a file that changes under a reader ends in a sentence."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest

from megatron_hdp.data.errors import CorpusError


@pytest.fixture
def prefix(corpus, tmp_path) -> str:
    for kind in ("bin", "idx"):
        shutil.copy(f"{corpus}.{kind}", tmp_path / f"own.{kind}")
    return str(tmp_path / "own")


def _open(prefix: str, *, mmap: bool = True):
    """(Megatron's dataset, ours); imported when Megatron is, over its stand-ins."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_hdp.data.token_file import TokenFile

    dataset = IndexedDataset(prefix, mmap=mmap)
    return dataset, TokenFile(dataset)


def test_it_reads_what_megatron_reads_also_in_another_process(prefix):
    dataset, file = _open(prefix)
    sent = pickle.loads(pickle.dumps(file))
    for document in range(len(dataset)):
        whole = dataset.get(document)
        assert np.array_equal(sent.get(document, 0, len(whole)), whole)
        assert sent.get(document, 0, len(whole)).dtype == whole.dtype
        assert np.array_equal(sent.get(document, len(whole) // 2, 1), whole[len(whole) // 2 :][:1])


@pytest.mark.parametrize("mmap", [True, False])
def test_tokens_that_are_gone_are_an_error_that_names_document_and_file(prefix, mmap):
    _, file = _open(prefix, mmap=mmap)
    last, length = len(file.lengths()) - 1, int(file.lengths()[-1])
    os.truncate(f"{prefix}.bin", os.path.getsize(f"{prefix}.bin") - 4)
    assert len(file.get(last, 0, length - 1)) == length - 1
    with pytest.raises(CorpusError, match=rf"document {last} cannot be read from {prefix}\.bin"):
        file.get(last, 0, length)
    os.truncate(f"{prefix}.bin", 0)
    with pytest.raises(CorpusError, match=r"0 tokens came instead of 1\)"):
        file.get(0, 0, 1)


def test_an_index_that_is_cut_short_or_gone_is_not_touched(prefix):
    _, file = _open(prefix)
    os.truncate(f"{prefix}.idx", 40)
    for ask in (file.check_index, lambda: file.get(0, 0, 1)):
        with pytest.raises(CorpusError, match=rf"{prefix}\.idx has 40 bytes where it had"):
            ask()
    os.remove(f"{prefix}.idx")
    with pytest.raises(CorpusError, match="No such file"):
        file.check_index()
