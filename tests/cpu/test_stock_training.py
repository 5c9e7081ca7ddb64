# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Stock Megatron, without HDP, trains, evaluates, saves and resumes in CPU mode."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cpu import faults
from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from tests.e2e.harness import SCRIPT, Recorded, pretrain, record

STEPS = 4


def _train(argv: list[str]) -> Recorded:
    return pretrain([*argv, "--train-iters", str(STEPS), "--use-distributed-optimizer"], fp64=False)


def test_same_losses_on_any_number_of_ranks(corpus):
    runs = {n: run_ranks(lambda: _train(["--data-path", corpus]), n)[0] for n in (1, 2, 4)}
    assert runs[1].losses[-1] < runs[1].losses[0] - 0.1, "it does not learn"
    for ranks in (2, 4):
        assert runs[ranks].losses == pytest.approx(runs[1].losses, rel=1e-5)
        assert runs[ranks].evaluations == pytest.approx(runs[1].evaluations, rel=1e-5)


@pytest.mark.slow
def test_pipeline_stages_and_bf16(corpus):
    argv = ["--data-path", corpus]
    single = run_ranks(lambda: _train(argv), 1)[0]
    staged = run_ranks(lambda: _train([*argv, "--pipeline-model-parallel-size", "2"]), 2)[-1]
    assert staged.losses == pytest.approx(single.losses, rel=1e-5)
    half = run_ranks(lambda: _train([*argv, "--bf16"]), 1)[0]
    assert half.losses == pytest.approx(single.losses, rel=2e-2)
    assert half.losses != single.losses


GPU_LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --position-embedding-type rope --vocab-size 127 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 4 --lr 3e-3 "
    "--train-iters 2 --eval-iters 0 --eval-interval 100 --log-interval 1 --mock-data"
).split()


def test_a_launch_line_made_for_gpus_needs_no_more_flags(megatron_on_cpu):
    """--hdp-cpu brings gloo, the local implementation and the rest as defaults."""

    def run() -> list[float]:
        sys.argv = [str(SCRIPT), *GPU_LINE, "--hdp-cpu"]
        return record(lambda: runpy.run_path(str(SCRIPT), run_name="__main__"), False, 0).losses

    first, second = run_ranks(run, 2)
    assert first == second
    assert len(first) == 2


def test_every_cpu_default_is_an_argument_and_the_command_line_wins(megatron_on_cpu):
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_hdp.cpu.arguments import CPU_DEFAULTS, set_cpu_defaults

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    set_cpu_defaults(parser)
    args = parser.parse_args(["--num-workers", "3"])
    assert args.num_workers == 3
    assert args.distributed_backend == CPU_DEFAULTS["distributed_backend"]
    assert args.attention_backend.name == CPU_DEFAULTS["attention_backend"]
    with pytest.raises(RuntimeError, match="gradient_accumulation_fusion"):
        set_cpu_defaults(argparse.ArgumentParser())


FORMATS = {"dp_reshardable": [], "fully_reshardable": ["--dist-ckpt-optim-fully-reshardable"]}


def _saving(corpus: str, folder: Path, more: list[str]) -> list[str]:
    return ["--data-path", corpus, "--save", str(folder), "--load", str(folder),
            "--save-interval", "2", "--ckpt-format", "torch_dist", *more]  # fmt: skip


def _differing(run: Recorded, other: Recorded) -> list[str]:
    return [n for n, value in run.params.items() if not np.array_equal(value, other.params[n])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_resumed_is_uninterrupted(corpus, tmp_path, kind):
    argv = _saving(corpus, tmp_path / "cut", FORMATS[kind])
    whole = run_ranks(lambda: _train(_saving(corpus, tmp_path / "whole", FORMATS[kind])), 2)
    first = run_ranks(lambda: _train([*argv, "--exit-interval", "2"]), 2)
    second = run_ranks(lambda: _train(argv), 2)
    for rank in range(2):
        losses = first[rank].losses + second[rank].losses
        assert losses == whole[rank].losses
        assert _differing(second[rank], whole[rank]) == []


@pytest.mark.slow
def test_resume_needs_each_of_the_three_handlings_of_torchs_adam(corpus, tmp_path):
    argv = _saving(corpus, tmp_path / "cut", [])
    run_ranks(lambda: _train([*argv, "--exit-interval", "2"]), 2)
    argv.remove("--save"), argv.remove(str(tmp_path / "cut"))  # loads only, so that all can

    def without(fault: faults.Fault) -> Recorded:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        name = fault.symbol.rsplit(".", 1)[1]
        setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name).__wrapped__)
        return _train(argv)

    with pytest.raises(RankFailedError, match=r"assert len\(steps\) == 1"):
        run_ranks(without, 2, faults.torch_adam.EMPTY_STATE)
    with pytest.raises(RankFailedError, match="a view of a leaf Variable"):
        run_ranks(without, 2, faults.torch_adam.LEAF_VIEWS)
    wrong = run_ranks(without, 2, faults.torch_adam.SHARED_STEP)[0]
    right = run_ranks(lambda: _train(argv), 2)[0]
    assert wrong.losses[0] == right.losses[0], "it loads the same"
    assert _differing(wrong, right), "and goes on the same, so the handling is not needed"
