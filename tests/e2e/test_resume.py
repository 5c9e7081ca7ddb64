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
def test_resume_on_another_domain_and_strategy_sees_the_same_sequences(corpus, tmp_path):
    argv = _arguments(corpus, tmp_path / "save", tmp_path / "a")
    first = run_ranks(lambda: pretrain([*argv, "--exit-interval", "6"], fp64=False), RANKS)
    argv[argv.index("--hdp-trace") + 1] = str(tmp_path / "b")
    argv[argv.index("--hdp-capacity") + 1] = "256"
    argv += ["--hdp-strategy", "static"]
    second = run_ranks(lambda: pretrain(argv, fp64=False), 2)
    whole = _arguments(corpus, tmp_path / "whole", tmp_path / "c")
    uninterrupted = run_ranks(lambda: pretrain(whole, fp64=False), RANKS)
    losses = first[0].losses + second[0].losses
    assert losses == pytest.approx(uninterrupted[0].losses, rel=1e-5)
    seen = _sequences(tmp_path / "a") | _sequences(tmp_path / "b")
    assert seen == _sequences(tmp_path / "c")
