# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""HDP equals stock Megatron on one process: loss, gradients, grad norm, parameters, evaluation."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.cost import CostModel
from tests.e2e.harness import Recorded, gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

STEPS = 20


@pytest.fixture(scope="module")
def stock(corpus):
    """Stock Megatron's run by global batch size (in packs) and precision; made once each."""

    @functools.cache
    def run(packs: int, fp64: bool = True) -> Recorded:
        argv = _arguments(corpus, packs)
        return run_ranks(lambda: stock_pretrain(argv, fp64=fp64, keep_grads=1), 1)[0]

    return run


def _arguments(corpus: str, packs: int) -> list[str]:
    return ["--data-path", corpus, "--train-iters", str(STEPS), "--global-batch-size", str(packs)]


CASES = {
    "1 rank": (1, 4, "--hdp-strategy naive"),
    "2 ranks": (2, 4, "--hdp-strategy naive --hdp-capacity 128"),
    "3 ranks, any ring": (3, 6, "--hdp-strategy naive --hdp-capacity 90"),
    "4 ranks, rings 1-4": (4, 4, "--hdp-strategy naive --hdp-capacity 64"),
    "4 ranks, static CP kept": (4, 4, "--hdp-strategy naive --context-parallel-size 2"),
    "batch of 1 pack on 4 ranks": (4, 1, "--hdp-strategy naive --context-parallel-size 4"),
    "static DP2 x CP2": (4, 4, "--hdp-strategy static --context-parallel-size 2"),
    "static CP4": (4, 4, "--hdp-strategy static --context-parallel-size 4"),
    "auto": (4, 4, "--hdp-capacity 64"),
    "auto, locals behind rings": (3, 6, "--hdp-capacity 90 --hdp-profile {costly}"),
    "dp-balance": (4, 4, "--hdp-strategy dp-balance --hdp-capacity 64"),
    "pp-balance": (4, 4, "--hdp-strategy pp-balance --hdp-capacity 64"),
    "planned in place": (2, 4, "--hdp-capacity 128 --hdp-plan-ahead 0"),
    "reference kernel": (4, 4, "--hdp-strategy naive --hdp-capacity 64 --hdp-attention reference"),
}


@pytest.fixture(scope="module")
def costly(tmp_path_factory) -> str:
    """A cost model in which a micro-batch costs so much that `auto` fills up behind rings."""
    path = tmp_path_factory.mktemp("profile") / "costly.json"
    preset = dataclasses.asdict(CostModel.load("h100-estimate"))
    path.write_text(json.dumps(dict(preset, name="costly", fixed_s=0.5)))
    return str(path)


@pytest.mark.parametrize("case", CASES)
def test_fp64_equals_stock(corpus, stock, costly, case):
    ranks, packs, more = CASES[case]
    argv = [*_arguments(corpus, packs), "--hdp", *more.format(costly=costly).split()]
    got = run_ranks(lambda: pretrain(argv, keep_grads=1), ranks)
    wanted = stock(packs)
    assert "behind" not in case or any(rank.mixed for rank in got)
    for rank in got:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)  # Megatron reports in fp32
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-12)
        assert rank.evaluations == pytest.approx(wanted.evaluations, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12


@pytest.mark.parametrize("strategy", ["naive", "auto"])
def test_a_pack_of_hundreds_equals_stock(dust, strategy):
    """Three packs of about 200 sequences each, most of them a single token."""
    argv = ["--data-path", dust, "--train-iters", "2", "--global-batch-size", "3"]
    wanted = run_ranks(lambda: stock_pretrain(argv, fp64=True, keep_grads=1), 1)[0]
    more = ["--hdp", "--hdp-strategy", strategy, "--hdp-capacity", "90"]
    got = run_ranks(lambda: pretrain([*argv, *more], keep_grads=1), 3)
    for rank in got:
        assert rank.sequences[0] > 450
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-12)
    assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12


def test_steps_mix_ring_sizes_and_unequal_counts(corpus):
    """The parity cases are worth something only if the plans have what they claim."""
    argv = [*_arguments(corpus, 4), "--hdp", *CASES["4 ranks, rings 1-4"][2].split()]
    got = run_ranks(lambda: pretrain(argv), 4)
    sizes = {size for step in got[0].rings for size in step}
    assert {2, 3, 4} <= sizes
    assert any(len(set(step)) > 1 for step in got[0].rings), "no step mixes ring sizes"
    counts = list(zip(*(rank.counts for rank in got), strict=True))
    assert sum(len(set(step)) > 1 for step in counts) >= 5, "counts are nearly always equal"


FP32_TOLERANCE = 1e-4
"""Largest parameter difference after 20 Adam steps, relative to the tensor's largest value."""
FP32_GRADIENT_TOLERANCE = 1e-5
"""The same of the first step's gradients."""


def test_fp32_equals_stock(corpus, stock):
    argv = [*_arguments(corpus, 4), "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "64"]
    got = run_ranks(lambda: pretrain([*argv, "--use-distributed-optimizer"], fp64=False), 4)
    wanted = stock(4, fp64=False)
    for rank in got:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < FP32_TOLERANCE


def test_fp32_tolerance_is_broken_by_one_wrong_token(corpus, stock):
    argv = [*_arguments(corpus, 4), "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "64"]
    got = run_ranks(lambda: _with_one_wrong_token(argv), 4)
    wanted = stock(4, fp64=False)
    assert worst_error(gather(got, "params"), gather([wanted], "params")) > FP32_TOLERANCE


def _with_one_wrong_token(argv: list[str]) -> Recorded:
    """Changes one token of the first step's first micro-batch on rank 0."""
    import os

    from megatron_hdp.data.loading import local

    read = local.read_batch
    planted = []

    def read_batch(*args):
        batch = read(*args)
        if not planted and os.environ["RANK"] == "0":
            planted.append(True)
            batch["tokens"][0, 0] = (batch["tokens"][0, 0] + 1) % 120
        return batch

    local.read_batch = read_batch
    return pretrain(argv, fp64=False)


def test_fp32_gradients_tell_one_shard_with_wrong_positions(corpus, stock):
    """One token moved by one position leaves them within 1e-6, which fp32 cannot tell."""
    argv = [*_arguments(corpus, 4), "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "64",
            "--exit-interval", "1"]  # fmt: skip
    right = run_ranks(lambda: pretrain(argv, fp64=False, keep_grads=1), 4)
    wrong = run_ranks(lambda: _with_wrong_positions(argv), 4)
    wanted = gather([stock(4, fp64=False)], "grads")
    assert worst_error(gather(right, "grads"), wanted) < FP32_GRADIENT_TOLERANCE
    assert worst_error(gather(wrong, "grads"), wanted) > FP32_GRADIENT_TOLERANCE


def _with_wrong_positions(argv: list[str]) -> Recorded:
    """In the first ring micro-batch of each rank but a ring's first, a shard counts from 0."""
    from megatron_hdp.runtime.executor import MicroBatchState

    build, planted = MicroBatchState.build, []

    def build_shifted(layout, **more):
        if not planted and layout.ring_tokens and layout.positions[0] > 0:
            planted.append(True)
            positions = layout.positions.copy()
            positions[: layout.ring_tokens] = range(layout.ring_tokens)
            layout = dataclasses.replace(layout, positions=positions)
        return build(layout, **more)

    MicroBatchState.build = build_shifted
    return pretrain(argv, fp64=False, keep_grads=1)
