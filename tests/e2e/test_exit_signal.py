# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's --exit-signal-handler under HDP: a preempted run saves, ends, and can go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import Recorded, pretrain

RANKS, STEPS = 3, 9


def _arguments(corpus: str, save: Path) -> list[str]:
    return [
        "--data-path", corpus, "--train-iters", str(STEPS), "--global-batch-size", "6", "--hdp",
        "--hdp-capacity", "90", "--use-distributed-optimizer", "--save", str(save),
        "--save-interval", "1000", "--load", str(save), "--dist-ckpt-optim-fully-reshardable",
        "--exit-signal-handler", "--exit-signal", "SIGUSR1",
    ]  # fmt: skip


def _train_signalled_in(step: int, argv: list[str]) -> Recorded:
    """Only rank 1 gets the signal, in the step's forward, and with it what it started."""
    if os.environ["RANK"] == "1":
        from megatron_hdp.runtime import executor

        run = executor._StepRun.run

        def run_signalled(self, *args):
            if self.step.step == step and self.record.kind == "train":
                os.killpg(0, signal.SIGUSR1)
            return run(self, *args)

        executor._StepRun.run = run_signalled
    return pretrain(argv, fp64=False)


@pytest.mark.slow
def test_signalled_and_resumed_is_uninterrupted(corpus, tmp_path):
    whole = run_ranks(lambda: pretrain(_arguments(corpus, tmp_path / "whole"), fp64=False), RANKS)
    argv = _arguments(corpus, tmp_path / "cut")
    first = run_ranks(lambda: _train_signalled_in(4, argv), RANKS)
    saved = (tmp_path / "cut" / "latest_checkpointed_iteration.txt").read_text()
    assert saved.strip() == "5", "all ranks end after the step that the signal came in"
    second = run_ranks(lambda: pretrain(argv, fp64=False), RANKS)
    for one, two, other in zip(first, second, whole, strict=True):
        assert one.losses + two.losses == other.losses
        assert one.grad_norms + two.grad_norms == other.grad_norms
        for name, value in other.params.items():
            assert np.array_equal(two.params[name], value), name
