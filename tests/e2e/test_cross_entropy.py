# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The chunked loss in the real pretraining loop against stock Megatron on one process, in fp64.

(The fused loss does the same in tests/runtime/interpreted_cross_entropy.py.)
"""

from __future__ import annotations

import functools

import pytest

from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from tests.e2e.harness import BASE, Recorded, gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

MODEL = ["--train-iters", "2", "--make-vocab-size-divisible-by", "64"]
UNTIED = "--untie-embeddings-and-output-weights"
# 24 tokens: no micro-batch is a multiple, and each has several chunks.
CHUNKED = "--hdp --hdp-cross-entropy chunked --hdp-cross-entropy-chunk 24".split()
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def stock(corpus):
    @functools.cache
    def run(tied: bool) -> Recorded:
        return run_ranks(lambda: _with_ties(stock_pretrain, corpus, [], tied), 1)[0]

    return run


def _with_ties(train, corpus: str, more: list[str], tied: bool) -> Recorded:
    """On a forked rank, whose BASE is its own."""
    if tied:
        BASE.remove(UNTIED)
    return train(["--data-path", corpus, *MODEL, *more], keep_grads=1)


CASES = {
    "HDP4": (4, False, "--hdp-capacity 64"),
    "HDP2, tied": (2, True, "--hdp-capacity 128"),
    "TP2 x HDP2": (4, False, f"{TP2} --hdp-capacity 128"),
    "TP2 x HDP2, sequence parallel, tied": (
        4, True, f"{TP2} --sequence-parallel --hdp-capacity 128"
    ),
    "PP2 x HDP2": (4, False, f"{PP2} --hdp-capacity 128"),
    "PP2 x HDP2, tied": (4, True, f"{PP2} --hdp-capacity 128"),
    "TP2 x PP2 x HDP2, sequence parallel": (
        8, False, f"{TP2} {PP2} --sequence-parallel --hdp-capacity 128"
    ),
    "overlap": (2, False, f"{OVERLAP} --hdp-capacity 128"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fp64_equals_stock(corpus, stock, case):
    ranks, tied, more = CASES[case]
    argv = [*CHUNKED, *more.split()]
    _check(run_ranks(lambda: _with_ties(pretrain, corpus, argv, tied), ranks), stock(tied), case)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sums_in_main_grad_equal_stock(corpus, stock, tied):
    """What --gradient-accumulation-fusion does, whose own kernels a CPU does not have."""

    def run() -> Recorded:
        from megatron_hdp.runtime import model
        from megatron_hdp.runtime.cross_entropy.chunked import _WeightGradient

        bind_loss, result, sums = model.bind_loss, _WeightGradient.result, []

        def bind(built, choice):
            bind_loss(built, choice)
            built.output_layer.gradient_accumulation_fusion = True

        def counted(self):
            sums.append(self._sum is self._main_grad)
            return result(self)

        model.bind_loss, _WeightGradient.result = bind, counted
        recorded = _with_ties(pretrain, corpus, [*CHUNKED, "--hdp-capacity", "128"], tied)
        assert sums
        assert all(sums)
        return recorded

    _check(run_ranks(run, 2), stock(tied), "main_grad")


@pytest.mark.slow
def test_auto_on_a_device_too_small_is_chunked(corpus, stock):
    """2.77 MiB by Megatron's loss and 2.69 chunked; first of 2.74 usable, then of too few."""
    chunk = ["--hdp", "--hdp-cross-entropy-chunk", "24"]

    def run() -> Recorded:
        from megatron_hdp.runtime.cross_entropy import model

        sizes, compute = [], model.linear_cross_entropy

        def counted(hidden, *args):
            sizes.append(len(hidden))
            return compute(hidden, *args)

        model.linear_cross_entropy = counted
        recorded = _with_ties(pretrain, corpus, [*chunk, "--hdp-device-memory", "0.00297"], False)
        assert sizes
        return recorded

    _check(run_ranks(run, 1), stock(False), "auto")
    small = [*chunk, "--hdp-device-memory", "0.0026", "--hdp-cross-entropy", "megatron"]
    sentence = (
        r"--hdp-capacity 256 with --hdp-cross-entropy megatron needs about 0.00271 GiB .*"
        r"device's 0.0026 GiB .*: give at most --hdp-capacity 196, or --hdp-cross-entropy "
        r"chunked with at most 205\."
    )
    with pytest.raises(RankFailedError, match=sentence):
        run_ranks(lambda: _with_ties(pretrain, corpus, small, False), 1)


@pytest.mark.slow
def test_z_loss_and_smoothing_are_in_training_only(corpus):
    """With a learning rate of 0, so that both evaluate the same parameters."""
    still = ["--hdp", "--lr", "0", "--min-lr", "0"]
    plain = run_ranks(lambda: _with_ties(pretrain, corpus, still, False), 1)[0]
    extras = ["--hdp-z-loss", "1e-2", "--hdp-label-smoothing", "0.1"]  # auto: chunked
    more = run_ranks(lambda: _with_ties(pretrain, corpus, [*still, *extras], False), 1)[0]
    assert all(a > b + 0.1 for a, b in zip(more.losses, plain.losses, strict=True))
    assert more.evaluations == pytest.approx(plain.evaluations, rel=1e-6)


def _check(got: list[Recorded], wanted: Recorded, case: str) -> None:
    for rank in got:
        # Megatron takes the norm's maximum over model-parallel ranks in fp32.
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
        if rank.losses:
            assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)
            assert rank.evaluations == pytest.approx(wanted.evaluations, rel=1e-6)
    if case != "overlap":  # there a rank's main_grad is whole in its own shard only
        assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12
