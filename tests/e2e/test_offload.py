# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Activation offload under Megatron's real training changes no bit of it."""

from __future__ import annotations

import contextlib
import io
import logging
import re

import numpy as np
import pytest

from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from megatron_hdp.planning.values import resident_fraction
from tests.e2e.harness import gather, worst_error
from tests.e2e.offload_run import RATIOS, train
from tests.e2e.oracle import stock_pretrain

STEPS = 2
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
    return ["--data-path", corpus, "--train-iters", str(STEPS), "--num-layers", "6",
            "--global-batch-size", "8", "--eval-interval", "1", "--hdp", "--hdp-plan-ahead", "0",
            *more.split()]  # fmt: skip


RUNS = [(p, r) for p in PIPELINES for r in ("none", "selective", "full")]
RUNS += [("PP1", "full, two layers a checkpoint"), ("PP2", "block")]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "recompute"), RUNS)
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


@pytest.mark.slow
def test_the_flag_gives_every_micro_batch_the_ratio(corpus):
    """The same plans, the same losses, the device's peak as Eq. 3 has it."""
    argv = _arguments(corpus, "--num-layers 8 --hdp-capacity 128")
    plain = run_ranks(lambda: train(argv), 2)
    for ratio in (0.0, 0.5, 1.0):
        flag = ["--hdp-offload-ratio", str(ratio)]
        got = run_ranks(lambda flag=flag: train([*argv, *flag]), 2)
        for run, wanted in zip(got, plain, strict=True):
            assert run.recorded.rings == wanted.recorded.rings
            assert run.recorded.losses == wanted.recorded.losses
            assert len(run.micro_batches) == (sum(run.recorded.counts) if ratio else 0)
            for micro_batch in run.micro_batches:
                assert micro_batch.ratio == ratio
                saved = sum(layer.saved_bytes for layer in micro_batch.layers)
                predicted = float(resident_fraction(ratio, 8)) * saved
                assert micro_batch.device_peak == pytest.approx(predicted, rel=0.05)


LONG = ["--num-layers", "8", "--train-iters", "2", "--global-batch-size", "4"]


@pytest.mark.slow
def test_a_sequence_longer_than_the_domain_equals_stock(corpus):
    """4 ranks hold 200 tokens, the longest sequence has 256: only offload makes it fit."""
    argv = ["--data-path", corpus, *LONG]
    wanted = run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]
    argv += ["--hdp", "--hdp-capacity", "50", "--hdp-offload"]
    got = run_ranks(lambda: train(argv, fp64=True, keep_grads=1), 4)
    assert any(run.micro_batches for run in got)
    recorded = [run.recorded for run in got]
    for rank in recorded:
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-12)
    assert worst_error(gather(recorded, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(recorded, "params"), gather([wanted], "params")) < 1e-12


def test_without_offload_it_is_refused(corpus):
    argv = ["--data-path", corpus, *LONG, "--hdp", "--hdp-capacity", "50"]
    with pytest.raises(RankFailedError, match="--hdp-capacity 50 x 4 ranks cannot hold"):
        run_ranks(lambda: train(argv), 4)
    # 10 tokens a rank are too few with everything that may go on the host.
    argv[-1:] = ["10", "--hdp-offload"]
    with pytest.raises(RankFailedError, match=r"--seq-length 256: .* does not fit 4 ranks"):
        run_ranks(lambda: train(argv), 4)


def test_the_line_shows_what_moved_and_what_found_no_room(corpus):
    argv = ["--data-path", corpus, *LONG, "--hdp", "--hdp-offload-ratio", "0.5"]
    line, _ = run_ranks(lambda: _printed(argv), 1)[0]
    assert re.search(r" ms \| offloaded \d\.\d{3} GiB \| auto", line)
    argv += ["--hdp-host-memory", "0.0001"]
    line, warnings = run_ranks(lambda: _printed(argv), 1)[0]
    assert re.search(r"offloaded 0\.000 GiB, \d\.\d{3} GiB over --hdp-host-memory \| auto", line)
    assert [w for w in warnings if "rank 0: --hdp-host-memory 0.0001 GiB is full" in w] == warnings
    assert len(warnings) == 1


def _printed(argv: list[str]) -> tuple[str, list[str]]:
    """(the last `hdp:` line, warnings of the executor) of one rank."""
    out, warnings = io.StringIO(), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("megatron_hdp.runtime.executor").addHandler(handler)
    with contextlib.redirect_stdout(out):
        train(argv)
    return [line for line in out.getvalue().splitlines() if "hdp: rings" in line][-1], warnings


SHAPES = {
    "plain": "",
    "RMSNorm, SwiGLU": "--normalization RMSNorm --swiglu",
    "bf16, no grouped queries": "--bf16 --swiglu --num-query-groups 4",
    "norms of q and k": "--qk-layernorm",
    "bias, no RoPE": "--position-embedding-type learned_absolute",
    "TP2": "--tensor-model-parallel-size 2",
    "TP2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "core_attn recomputed": "--recompute-granularity selective --recompute-modules core_attn",
    "mlp recomputed": "--recompute-granularity selective --recompute-modules mlp",
    "full": RECOMPUTE["full"],
    "PP2": "--pipeline-model-parallel-size 2",
}
MASK_TYPE = 4
"""Bytes of the enum that Megatron's core attention checkpoint saves as a tensor."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_planner_predicts_the_bytes(corpus, shape):
    """Act(s) of the planner is what the engine counts in a layer, to the byte."""
    ranks = 2 if "P2" in shape else 1
    argv = _arguments(corpus, f"--hdp-offload-ratio 0.5 {SHAPES[shape]} --train-iters 1")
    for run, expected in run_ranks(lambda: _with_prediction(argv), ranks):
        assert run.micro_batches
        for micro_batch in run.micro_batches:
            counted = [layer.saved_bytes / micro_batch.tokens for layer in micro_batch.layers]
            slack = MASK_TYPE / micro_batch.tokens if shape.startswith("core_attn") else 0
            for per_token in counted[1:-1]:
                assert per_token == pytest.approx(expected + slack, rel=1e-12)


def _with_prediction(argv):
    from megatron.training import get_args

    from megatron_hdp.planning.activations import saved_bytes
    from megatron_hdp.runtime.model_shape import model_shape

    run = train(argv)
    return run, saved_bytes(model_shape(get_args()))
