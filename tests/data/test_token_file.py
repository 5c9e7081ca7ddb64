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
        with pytest.raises(CorpusError, match=rf"{prefix}\.idx has 40 bytes where it had") as told:
            ask()
        assert f"{prefix}.bin" not in str(told.value)


def test_files_that_are_replaced_or_removed_by_path_are_still_read(prefix):
    dataset, file = _open(prefix)
    whole = dataset.get(3).copy()
    file.get(0, 0, 1)
    os.remove(f"{prefix}.idx")
    os.remove(f"{prefix}.bin")
    assert np.array_equal(file.get(3, 0, len(whole)), whole)


def test_storage_that_fails_for_a_while_is_read_again(prefix, monkeypatch):
    _, file = _open(prefix)
    from megatron_hdp.data import token_file

    wanted, real, faults = file.get(0, 0, 1), os.pread, [5, 116]

    def pread(*args):
        if faults:
            raise OSError(faults.pop(), "planted")
        return real(*args)

    monkeypatch.setattr(token_file, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(os, "pread", pread)
    assert np.array_equal(file.get(0, 0, 1), wanted)
    faults.extend([5] * 4)
    with pytest.raises(CorpusError, match=r"planted.*its storage fails"):
        file.get(0, 0, 1)
