# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed is the run that was not: losses, sequences, parameters."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from tests.e2e.harness import Recorded, pretrain

RANKS = 3


def _arguments(corpus: str, save: Path, trace: Path) -> list[str]:
    return [
        "--data-path", corpus, "--train-iters", "9", "--global-batch-size", "6", "--hdp",
        "--hdp-strategy", "naive", "--hdp-capacity", "90", "--use-distributed-optimizer",
        "--save", str(save), "--load", str(save), "--save-interval", "3", "--ckpt-format",
        "torch_dist", "--hdp-trace", str(trace), "--dist-ckpt-optim-fully-reshardable",
    ]  # fmt: skip


def _train_until(argv: list[str], killed_in_step: int | None) -> Recorded:
    """Rank 1 kills itself with SIGKILL in the given step's forward."""
    if killed_in_step is not None and os.environ["RANK"] == "1":
        from megatron_hdp.runtime import executor

        run = executor._StepRun.run

        def run_or_die(self, *args):
            if self.step.step == killed_in_step and self.record.kind == "train":
                os.kill(os.getpid(), signal.SIGKILL)
            return run(self, *args)

        executor._StepRun.run = run_or_die
    return pretrain(argv, fp64=False)


def _sequences(trace: Path) -> dict[int, str]:
    records = (json.loads(line) for line in (trace / "rank00000.jsonl").read_text().splitlines())
    return {r["step"]: r["sequences"] for r in records if r["kind"] == "train"}


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(corpus, tmp_path):
    whole = _arguments(corpus, tmp_path / "whole", tmp_path / "whole-trace")
    uninterrupted = run_ranks(lambda: pretrain(whole, fp64=False), RANKS)

    argv = _arguments(corpus, tmp_path / "cut", tmp_path / "first-trace")
    with pytest.raises(RankFailedError, match="rank 1 died with -9"):
        run_ranks(lambda: _train_until(argv, 7), RANKS)
    saved = (tmp_path / "cut" / "latest_checkpointed_iteration.txt").read_text()
    assert saved.strip() == "6"

    argv[argv.index("--hdp-trace") + 1] = str(tmp_path / "second-trace")
    resumed = run_ranks(lambda: _train_until(argv, None), RANKS)
    for one, other in zip(resumed, uninterrupted, strict=True):
        assert one.losses == other.losses[6:]
        assert one.grad_norms == other.grad_norms[6:]
        for name, value in other.params.items():
            assert np.array_equal(one.params[name], value), name
    wanted = _sequences(tmp_path / "whole-trace")
    assert sorted(wanted) == list(range(9))
    assert len(set(wanted.values())) == 9, "two steps have the same sequences"
    assert _sequences(tmp_path / "second-trace") == {step: wanted[step] for step in (6, 7, 8)}


@pytest.mark.slow
def test_resume_on_other_meshes_sees_the_same_sequences(corpus, tmp_path):
    """Three steps each: HDP 3, then PP 2 x HDP 2 with another capacity and strategy, then HDP 2."""
    meshes = [
        (3, "3", []),
        (4, "6", ["--pipeline-model-parallel-size", "2", "--hdp-capacity", "128",
                  "--hdp-strategy", "auto"]),
        (2, "9", ["--hdp-capacity", "256", "--hdp-strategy", "static"]),
    ]  # fmt: skip
    losses, seen = [], {}
    for ranks, last, more in meshes:
        trace = tmp_path / f"to-{last}"
        argv = [*_arguments(corpus, tmp_path / "save", trace), *more, "--exit-interval", last]
        losses += run_ranks(lambda argv=argv: pretrain(argv, fp64=False), ranks)[-1].losses
        seen |= _sequences(trace)
    whole = _arguments(corpus, tmp_path / "whole", tmp_path / "whole-trace")
    uninterrupted = run_ranks(lambda: pretrain(whole, fp64=False), RANKS)
    assert losses == pytest.approx(uninterrupted[0].losses, rel=1e-5)
    assert len(losses) == 9
    assert seen == _sequences(tmp_path / "whole-trace")
