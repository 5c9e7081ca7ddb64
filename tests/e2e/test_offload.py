# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Activation offload under Megatron's real training changes no bit of it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import resident_fraction
from tests.e2e.offload_run import RATIOS, train

STEPS = 6
PIPELINES = {
    "PP1": (2, "--hdp-capacity 128"),
    "PP2": (4, "--hdp-capacity 128 --pipeline-model-parallel-size 2"),
}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "full, two layers a checkpoint": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
}


def _arguments(corpus: str, more: str) -> list[str]:
    # Eight packs: several micro-batches a rank. Evaluation between steps.
    return ["--data-path", corpus, "--train-iters", str(STEPS), "--num-layers", "8",
            "--global-batch-size", "8", "--eval-interval", "2", "--hdp", "--hdp-plan-ahead", "0",
            *more.split()]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_bitwise_equal(corpus, pipeline, recompute):
    """Every ratio, in every step another one per micro-batch, against no offload."""
    ranks, more = PIPELINES[pipeline]
    argv = _arguments(corpus, f"{more} {RECOMPUTE[recompute]}")
    plain = run_ranks(lambda: train(argv, keep_grads=STEPS), ranks)
    mixed = run_ranks(lambda: train(argv, mixed_ratios=True, keep_grads=STEPS), ranks)
    for wanted, got in zip(plain, mixed, strict=True):
        assert not wanted.micro_batches
        assert {m.ratio for m in got.micro_batches} == set(RATIOS) - {0.0}
        assert got.recorded.losses == wanted.recorded.losses
        assert got.recorded.evaluations == wanted.recorded.evaluations
        assert got.recorded.grad_norms == wanted.recorded.grad_norms
        for after, before in zip(got.recorded.grads, wanted.recorded.grads, strict=True):
            assert all(np.array_equal(after[name], before[name]) for name in before)
        assert all(
            np.array_equal(got.recorded.params[name], value)
            for name, value in wanted.recorded.params.items()
        )
        _check_bytes(got)
        assert got.base == [(0, 0)] * len(got.base)
        assert len(got.base) == STEPS
    if pipeline == "PP2":
        assert max(run.most_in_flight for run in mixed) >= 2


def _check_bytes(run) -> None:
    """Ratio by layer, exact to one row; the last layer of the stage stays."""
    for micro_batch in run.micro_batches:
        *others, last = micro_batch.layers
        assert last.offloaded_bytes == 0
        for layer in others:
            assert abs(layer.offloaded_bytes - micro_batch.ratio * layer.saved_bytes) <= 512
            assert layer.saved_bytes > 0


@pytest.mark.parametrize("ratio", ["0", "0.5", "1"])
def test_the_flag_gives_every_micro_batch_the_ratio(corpus, ratio):
    argv = _arguments(corpus, f"--hdp-capacity 128 --hdp-offload-ratio {ratio} --train-iters 2")
    plain = run_ranks(lambda: train(argv[: argv.index("--hdp-offload-ratio")]), 2)
    got = run_ranks(lambda: train(argv), 2)
    for run, wanted in zip(got, plain, strict=True):
        assert run.recorded.rings == wanted.recorded.rings[: len(run.recorded.rings)]
        assert run.recorded.losses == wanted.recorded.losses[:2]
        if ratio == "0":
            assert not run.micro_batches
            continue
        assert len(run.micro_batches) == sum(run.recorded.counts)
        for micro_batch in run.micro_batches:
            assert micro_batch.ratio == float(ratio)
            saved = sum(layer.saved_bytes for layer in micro_batch.layers)
            predicted = float(resident_fraction(float(ratio), 8)) * saved
            assert micro_batch.device_peak == pytest.approx(predicted, rel=0.05)
