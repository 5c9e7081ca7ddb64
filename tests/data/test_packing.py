# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Packs: whole sequences, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from megatron_hdp.data.packing import build_epochs, epoch_order, pack_starts
from tests.data.test_sources import build  # noqa: F401


def test_packs_hold_whole_sequences_up_to_the_context():
    lengths = np.random.RandomState(1).randint(1, 257, 5000)
    starts = pack_starts(lengths, 256)
    totals = np.add.reduceat(lengths, starts[:-1])
    assert totals.max() <= 256
    assert totals.sum() == lengths.sum()
    following = lengths[starts[1:-1]]
    assert np.all(totals[:-1] + following > 256), "a pack was closed too early"


def test_one_sequence_and_hundreds_in_a_pack():
    assert pack_starts(np.array([256]), 256).tolist() == [0, 1]
    assert pack_starts(np.ones(600, np.int64), 256).tolist() == [0, 256, 512, 600]


def test_order_is_a_permutation_of_seed_and_epoch():
    base = epoch_order(1000, 1, 0)
    assert np.array_equal(np.sort(base), np.arange(1000))
    assert not np.array_equal(base, epoch_order(1000, 1, 1))
    assert not np.array_equal(base, epoch_order(1000, 2, 0))
    # Frozen: a change of this hash changes every user's resumed data order.
    assert hashlib.sha256(base.astype("<i8").tobytes()).hexdigest()[:16] == "e3ac50c4bfac424f"


def test_more_packs_only_extend_the_list():
    lengths = np.random.RandomState(2).randint(1, 257, 300)
    few, many = (build_epochs(lengths, 256, 3, packs) for packs in (100, 700))
    assert np.array_equal(few[1], many[1][: len(few[1])])
    assert np.array_equal(few[0], many[0][: len(few[0])])
    assert len(many[1]) > 700
    epochs = many[0].reshape(-1, 300)
    assert all(np.array_equal(np.sort(epoch), np.arange(300)) for epoch in epochs)


def test_document_packs_are_cached_and_read_back(build, corpus, tmp_path):  # noqa: F811
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_hdp.data.pack_dataset import DocumentPackDataset
    from megatron_hdp.data.sources import source_of

    first, second = build(DocumentPackDataset), build(DocumentPackDataset)
    assert len(list(tmp_path.glob("*pack_index.npy"))) == 3
    assert isinstance(second.sample_index, np.memmap)
    assert np.array_equal(first.document_index, second.document_index)
    source, tokens = source_of(second), IndexedDataset(corpus)
    for pack in (0, 1, 57):
        for position, length in enumerate(source.lengths(pack)):
            document = tokens.get(source.document(pack, position))
            piece = source.read(pack, position, 0, int(length))
            assert np.array_equal(piece.tokens, document)
            assert np.array_equal(piece.labels[:-1], document[1:])
            assert piece.loss_mask.tolist() == [1.0] * (int(length) - 1) + [0.0]
    with pytest.raises(TypeError, match=r"megatron_hdp\.enable"):
        second[0]


def test_a_corpus_built_again_does_not_find_the_old_packs(build, corpus, tmp_path):  # noqa: F811
    """Megatron's own cache key is the path alone."""
    import shutil

    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron_hdp.data.pack_dataset import DocumentPackDataset

    prefix = str(tmp_path / "again")
    for end in (".idx", ".bin"):
        shutil.copy(corpus + end, prefix + end)
    before = build(DocumentPackDataset, prefixes=(prefix,))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(400):
        builder.add_item(torch.zeros(200, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    after = build(DocumentPackDataset, prefixes=(prefix,))
    packs = np.diff(after.sample_index)
    assert np.diff(before.sample_index).max() > 1
    assert packs.max() == 1, "200-token documents do not share a pack of 256"


def test_blends_keep_their_weights(build, corpus):  # noqa: F811
    from megatron_hdp.data.pack_dataset import DocumentPackDataset
    from megatron_hdp.data.sources import BlendSource, source_of

    dataset = build(DocumentPackDataset, prefixes=(corpus, corpus), weights=[3.0, 1.0])
    source = source_of(dataset)
    assert isinstance(source, BlendSource)
    share = np.mean(np.asarray(dataset.dataset_index)[:200] == 0)
    assert share == pytest.approx(0.75, abs=0.02)
    assert source.lengths(5).sum() <= 256
    assert len(source.read(5, 0, 0, 1).tokens) == 1


def test_long_documents_are_cut_or_dropped(build, corpus):  # noqa: F811
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_hdp.data.errors import CorpusError
    from megatron_hdp.data.pack_dataset import DocumentPackDataset, PackDatasetConfig
    from megatron_hdp.data.sources import source_of

    def source(policy):
        more = {"config_class": PackDatasetConfig, "hdp_long_documents": policy}
        return source_of(build(DocumentPackDataset, sequence_length=100, num_samples=None, **more))

    with pytest.raises(CorpusError, match=r"--seq-length 100 is shorter than .* cut or drop"):
        source("fail")
    tokens = IndexedDataset(corpus)
    cut, dropped = source("cut"), source("drop")
    parts, targets = {}, 0
    for pack in range(len(cut)):
        for position, length in enumerate(cut.lengths(pack)):
            piece = cut.read(pack, position, 0, int(length))
            targets += piece.loss_mask.sum()
            parts.setdefault(cut.document(pack, position), []).append(piece.tokens)
    for document, pieces in parts.items():
        whole = tokens.get(document)
        assert sum(map(len, pieces)) == len(whole)
        assert sorted(map(len, pieces), reverse=True)[:-1] == [100] * (len(pieces) - 1)
        assert np.array_equal(np.sort(np.concatenate(pieces)), np.sort(whole))
    # Only a document's last token has no target: those at a cut have the one behind it.
    assert targets == sum(len(tokens.get(document)) - 1 for document in parts)
    short = [d for d in parts if len(tokens.get(d)) <= 100]
    assert sum(len(dropped.lengths(pack)) for pack in range(len(dropped))) == len(short)


def test_a_blend_of_corpora_keeps_its_weights_in_tokens(build, corpus, dust):  # noqa: F811
    from megatron_hdp.data.pack_dataset import DocumentPackDataset
    from megatron_hdp.data.sources import source_of

    # Long documents leave room in their packs; those of 1 to 3 tokens do not.
    source = source_of(build(DocumentPackDataset, prefixes=(corpus, dust), weights=[0.6, 0.4]))
    tokens = [0, 0]
    for pack in range(len(source)):
        lengths = source.lengths(pack)
        tokens[int(lengths.max() <= 3)] += int(lengths.sum())
    assert len(source) == 200
    assert abs(tokens[0] / sum(tokens) - 0.6) < 0.005
