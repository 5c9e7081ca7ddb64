# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Sources against Megatron's own datasets, token for token."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def build(corpus, tmp_path):
    """Builds a dataset of a class through Megatron's own builder; returns (train, config)."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    class Tokenizer:
        vocab_size = 127
        eod = 126
        unique_identifiers = {"class": "test"}  # noqa: RUF012

    def run(dataset_class, num_samples=(200, 4, 4), prefixes=(corpus,), weights=None, **more):
        config = more.pop("config_class", GPTDatasetConfig)(
            random_seed=7,
            sequence_length=more.pop("sequence_length", 256),
            blend=(list(prefixes), weights),
            split="90,5,5",
            path_to_cache=str(tmp_path),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=more.pop("eod_mask_loss", False),
            create_attention_mask=False,
            **more,
        )
        builder = BlendedMegatronDatasetBuilder(
            dataset_class, list(num_samples or (None, None, None)), lambda: True, config
        )
        return builder.build()[0]

    return run


@pytest.mark.parametrize("more", [{}, {"eod_mask_loss": True}, {"inter_document_masking": True}],
                         ids=["plain", "eod-masked", "documents"])  # fmt: skip
def test_samples_are_megatrons_own(build, more):
    from megatron.core.datasets.gpt_dataset import GPTDataset

    from megatron_hdp.data.sources import source_of

    dataset = build(GPTDataset, **more)
    source = source_of(dataset)
    for pack in range(200):
        sample = dataset[pack]
        lengths = source.lengths(pack)
        boundaries = np.concatenate(([0], np.cumsum(lengths)))
        if more.get("inter_document_masking"):
            wanted = np.unique(sample["cu_seqlens"].numpy())
            assert np.array_equal(boundaries, wanted)
        else:
            assert len(lengths) == 1
        for position, length in enumerate(lengths):
            cut = int(length) // 3
            for start, stop in ((0, cut), (cut, int(length))):
                if start == stop:
                    continue
                piece = source.read(pack, position, start, stop)
                rows = slice(boundaries[position] + start, boundaries[position] + stop)
                for name in ("tokens", "labels", "loss_mask"):
                    got, want = getattr(piece, name), sample[name][rows].numpy()
                    assert np.array_equal(got, want), (pack, position, name)
