# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different plans end with one error that names the field and the ranks."""

from __future__ import annotations

import os

import pytest

from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from tests.e2e.harness import pretrain

BASE = ["--train-iters", "3", "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "128"]


def test_another_corpus_on_one_rank(corpus, tmp_path):
    """Same lengths, other tokens: nothing but the digest would ever notice."""
    import numpy as np

    other = str(tmp_path / "tiny")
    tokens = np.fromfile(f"{corpus}.bin", np.int32)
    tokens[tokens < 100] += 1
    tokens.tofile(f"{other}.bin")
    with open(f"{corpus}.idx", "rb") as source, open(f"{other}.idx", "wb") as target:
        target.write(source.read())

    def run():
        pretrain(["--data-path", other if os.environ["RANK"] == "1" else corpus, *BASE])

    with pytest.raises(RankFailedError, match=r"step 0 of train differs.*corpus.*ranks? 0.*1"):
        run_ranks(run, 2)


def test_another_flag_on_one_rank(corpus):
    def run():
        capacity = "100" if os.environ["RANK"] == "2" else "110"
        pretrain(["--data-path", corpus, *BASE, "--hdp-capacity", capacity,
                  "--global-batch-size", "6"])  # fmt: skip

    with pytest.raises(RankFailedError, match=r"differs.*config \(.* on ranks 0-1; .* on ranks 2"):
        run_ranks(run, 3)


def test_another_seed_on_one_rank(corpus):
    def run():
        pretrain(
            ["--data-path", corpus, *BASE, "--seed", "4" if os.environ["RANK"] == "0" else "5"]
        )

    with pytest.raises(RankFailedError, match=r"sequences"):
        run_ranks(run, 2)
