# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One rank that differs, be it a TP or PP sibling: the same error on all, with ranks and flag."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.e2e.drills import ends_of
from tests.e2e.harness import pretrain

BASE = ["--train-iters", "3", "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "128"]
TENSOR = ["--tensor-model-parallel-size", "2"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


def _all_said(argv: list[str], odd_rank: int, odd: list[str]) -> str:
    """The one sentence with which four ranks ended; `odd_rank` was launched with more arguments."""

    def run():
        pretrain([*argv, *(odd if int(os.environ["RANK"]) == odd_rank else [])], fp64=False)

    ends = ends_of(run, 4)
    assert [end.code for end in ends] == [1, 1, 1, 1]
    sentences = {end.said.splitlines()[-1].partition("HDP's plan of ")[2] for end in ends}
    assert len(sentences) == 1, sentences
    return sentences.pop()


@pytest.mark.parametrize(
    ("layout", "odd", "words"),
    [
        (TENSOR, ["--seed", "5"], "--seed is 1234 on ranks 0-2, 5 on ranks 3"),
        (PIPELINE, ["--hdp-capacity", "200"], "--hdp-capacity is 128 on ranks 0-2, 200 on ranks 3"),
        (PIPELINE, ["--hdp-strategy", "auto"], "--hdp-strategy is naive on ranks 0-2, auto on"),
        (TENSOR, ["--eod-mask-loss"], "--eod-mask-loss is False on ranks 0-2, True on ranks 3"),
    ],
    ids=["seed TP2", "capacity PP2", "strategy PP2", "loss mask TP2"],
)
def test_another_flag_on_one_rank(corpus, layout, odd, words):
    said = _all_said(["--data-path", corpus, *BASE, *layout], 3, odd)
    assert said.startswith("step 0 of train differs between ranks in config (")
    assert words in said
    assert " on ranks 0-2, " in said


def test_another_corpus_on_one_rank(corpus, tmp_path):
    """Same lengths, other tokens: nothing but the digest would ever notice."""
    other = str(tmp_path / "tiny")
    tokens = np.fromfile(f"{corpus}.bin", np.int32)
    tokens[tokens < 100] += 1
    tokens.tofile(f"{other}.bin")
    with open(f"{corpus}.idx", "rb") as source, open(f"{other}.idx", "wb") as target:
        target.write(source.read())
    said = _all_said(["--data-path", corpus, *BASE, *PIPELINE], 2, ["--data-path", other])
    assert said.startswith("step 0 of train differs between ranks in corpus (")
    assert " on ranks 0-1,3, " in said
    assert " on ranks 2)" in said
