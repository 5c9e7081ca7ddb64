# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Training on text: a blend of compressed JSON lines, parquet, chats and a corpus, for real."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.data.texts import FIRST_BYTE, byte_vocabulary, write
from tests.e2e.harness import Recorded, gather, pretrain, worst_error


@pytest.fixture
def arguments(corpus, tmp_path):
    """A launch line whose four sources are of four kinds; corpus ids are bytes' too."""
    rng = np.random.RandomState(4)

    def text() -> str:
        return "".join(map(chr, rng.randint(97, 123, rng.randint(1, 250))))

    chats = [
        {"messages": [{"role": "user", "content": text()[:60]},
                      {"role": "assistant", "content": text()[:60]}]}
        for _ in range(60)
    ]  # fmt: skip
    paths = [
        write(tmp_path / "web.jsonl.zst", [{"text": text()} for _ in range(80)]),
        write(tmp_path / "books.parquet", [{"text": text() * 3} for _ in range(40)]),
        write(tmp_path / "chats.jsonl", chats),
        corpus,
    ]
    weights = "0.4", "0.2", "0.2", "0.2"
    blend = [word for pair in zip(weights, paths, strict=True) for word in pair]

    def make(save: str, cache: str, trace: str) -> list[str]:
        return [
            "--data-path", *blend, "--data-cache-path", str(tmp_path / cache),
            "--tokenizer-type", "TikTokenizer", "--tokenizer-model", byte_vocabulary(tmp_path),
            "--tiktoken-num-special-tokens", str(FIRST_BYTE), "--vocab-size", str(256 + FIRST_BYTE),
            "--train-iters", "6", "--global-batch-size", "6", "--hdp", "--hdp-capacity", "128",
            "--hdp-long-documents", "cut", "--save", str(tmp_path / save), "--load",
            str(tmp_path / save), "--save-interval", "3", "--ckpt-format", "torch_dist",
            "--hdp-trace", str(tmp_path / trace), "--eval-iters", "0",
        ]  # fmt: skip

    return make


@pytest.mark.slow
def test_a_blend_of_text_trains_and_resumes_elsewhere(arguments, tmp_path):
    whole = run_ranks(lambda: pretrain(arguments("whole", "cache", "a")), 2)
    cut = arguments("cut", "cache2", "b")
    first = run_ranks(lambda: pretrain([*cut, "--exit-interval", "3"]), 2)
    shutil.rmtree(tmp_path / "cache2")
    resumed = run_ranks(lambda: pretrain(cut), 3)
    losses = first[0].losses + resumed[0].losses
    assert losses == pytest.approx(whole[0].losses, rel=1e-12)
    assert len(losses) == 6
    assert whole[0].losses[-1] < whole[0].losses[0]
    # It went on from the checkpoint's own state, not by a walk through what was consumed.
    state = next((tmp_path / "cut").glob("iter_0000003/**/train_dataloader_dprank000.pt"))
    assert state.stat().st_size < 4096


def _counting_masked(argv: list[str]) -> tuple[Recorded, int]:
    """With the number of micro-batches of this rank in which no token is trained on."""
    from megatron_hdp.data.loading import local

    read, masked = local.read_batch, []

    def reading(*args):
        batch = read(*args)
        masked.append(batch["tokens"].shape[1] > 1 and not batch["loss_mask"].any())
        return batch

    local.read_batch = reading
    return pretrain(argv, keep_grads=2), sum(masked)


@pytest.mark.slow
def test_shards_ranks_and_micro_batches_without_a_target(megatron_on_cpu, tmp_path):
    """Unanswered chats train on nothing: gradients are those of the rest, and no NaN."""
    rng = np.random.RandomState(6)
    question = {"messages": [{"role": "user", "content": "?" * 190}]}
    texts = [{"text": "".join(map(chr, rng.randint(97, 123, 40)))} for _ in range(20)]
    records = [record for text in texts for record in (question, text)]
    argv = [
        "--data-path", write(tmp_path / "a.jsonl", records), "--split", "100,0,0",
        "--data-cache-path", str(tmp_path), "--tokenizer-type", "TikTokenizer",
        "--tokenizer-model", byte_vocabulary(tmp_path), "--tiktoken-num-special-tokens",
        str(FIRST_BYTE), "--vocab-size", str(256 + FIRST_BYTE), "--train-iters", "2",
        "--global-batch-size", "6", "--eval-iters", "0", "--hdp",
    ]  # fmt: skip
    one = run_ranks(lambda: _counting_masked(argv), 1)
    three = run_ranks(lambda: _counting_masked([*argv, "--hdp-capacity", "90"]), 3)
    assert all(masked > 0 for _, masked in three), "no rank had a micro-batch without a target"
    got, wanted = [recorded for recorded, _ in three], [one[0][0]]
    assert got[0].losses == pytest.approx(wanted[0].losses, rel=1e-12)
    assert worst_error(gather(got, "grads"), gather(wanted, "grads")) < 1e-12
    assert all(np.isfinite(value).all() for value in got[0].grads[1].values())
