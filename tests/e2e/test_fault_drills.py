# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, and a disk that is full: who says what, and that nothing is lost."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import resource
import signal
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.e2e.drills import End, ends_of
from tests.e2e.harness import pretrain

RANKS = 4
STEPS = 12
"""With --save-interval 3."""


class Fault(NamedTuple):
    """What goes wrong in one run, on one rank."""

    where: str
    step: int
    """Steps count from 0 over the whole training, as in messages; the save after step 2 is 2."""
    rank: int


# Every run resumes from what the one before it left behind; rank 1 and 3 are pipeline siblings.
FAULTS = (
    Fault("forward", 1, rank=1),  # before there is any checkpoint
    Fault("middle of a save", 2, rank=2),
    Fault("ring", 4, rank=0),
    Fault("full disk", 5, rank=2),
    Fault("optimizer step", 7, rank=3),
    Fault("end of a save", 8, rank=0),
    Fault("any time", 9, rank=1),
    Fault("any time", 9, rank=2),
)


def _arguments(corpus: str, save: Path, trace: Path) -> list[str]:
    return [
        "--data-path", corpus, "--train-iters", str(STEPS), "--hdp", "--hdp-strategy", "naive",
        "--hdp-capacity", "128", "--pipeline-model-parallel-size", "2", "--save", str(save),
        "--load", str(save), "--save-interval", "3", "--use-distributed-optimizer",
        "--overlap-grad-reduce", "--hdp-trace", str(trace), "--ckpt-format", "torch_dist",
    ]  # fmt: skip


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _plant(fault: Fault, seed: int) -> None:
    """On the rank that is to fail; each place is in the midst of what it names."""
    if int(os.environ["RANK"]) != fault.rank:
        return
    if fault.where == "forward":
        _in_a_forward(fault.step)
    elif fault.where == "ring":
        _in_a_ring(fault.step)
    elif fault.where == "optimizer step":
        _in_the_optimizer(fault.step)
    elif fault.where == "middle of a save":
        _in_a_save(fault.step, _die_in_a_shard)
    elif fault.where == "end of a save":
        _in_a_save(fault.step, _die_before_it_counts)
    elif fault.where == "full disk":
        _in_a_save(fault.step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16,) * 2))
    else:
        _after(random.Random(seed).uniform(0.0, 1.0))


def _in_a_forward(step: int) -> None:
    """At the first ring from that step on, while its other members wait for K/V."""
    from megatron_hdp.runtime import core_attention

    run = core_attention.ring_attention

    def dying(q, k, v, state, **kwargs):
        if state.step >= step and state.layout.ring:
            _die()
        return run(q, k, v, state, **kwargs)

    core_attention.ring_attention = dying


def _in_a_ring(step: int) -> None:
    """At the first ring's backward from that step on, with a transfer under way."""
    from megatron_hdp.runtime.communicator import Transfer

    wait = Transfer.wait

    def dying(self):
        if self._label.step >= step and self._label.phase == "backward":
            _die()
        return wait(self)

    Transfer.wait = dying


def _in_the_optimizer(step: int) -> None:
    """Gradients are reduced, parameters not yet gathered."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    step_with_ready_grads = DistributedOptimizer.step_with_ready_grads

    def dying(self):
        from megatron.training import get_args

        if get_args().curr_iteration == step:
            _die()
        return step_with_ready_grads(self)

    DistributedOptimizer.step_with_ready_grads = dying


def _in_a_save(step: int, do) -> None:
    from megatron.training import training

    save = training.save_checkpoint

    def failing(iteration, *args, **kwargs):
        if iteration == step + 1:
            do()
        return save(iteration, *args, **kwargs)

    training.save_checkpoint = failing


def _die_in_a_shard() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    write = filesystem_async._write_item
    written = []

    @functools.wraps(write)  # Megatron looks at its signature
    def dying(*args, **kwargs):
        if len(written) == 3:
            _die()
        written.append(write(*args, **kwargs))
        return written[-1]

    filesystem_async._write_item = dying


def _die_before_it_counts() -> None:
    """All shards are written, the file that names the newest checkpoint is not."""
    from megatron.training import checkpointing

    checkpointing.get_checkpoint_tracker_filename = lambda *_: _die()


def _after(seconds: float) -> None:
    """So long after the first step of the run began."""
    from megatron.training import training

    train_step, started = training.train_step, []

    def timed(*args, **kwargs):
        if not started:
            started.append(threading.Timer(seconds, _die))
            started[0].start()
        return train_step(*args, **kwargs)

    training.train_step = timed


def _train(argv: list[str], fault: Fault | None = None, seed: int = 0):
    if fault is not None:
        _plant(fault, seed)
    return pretrain(argv, fp64=False)


def _sequences(trace: Path) -> dict[int, str]:
    """What a run trained on, by step; empty when it died in its first."""
    log = trace / "rank00000.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {r["step"]: r["sequences"] for r in records if r["kind"] == "train"}


def _check_last_words(fault: Fault, ends: list[End]) -> None:
    """Nobody hangs (`ends_of`), nobody ends well, and who waited for the failed rank says so."""
    assert all(end.code != 0 for end in ends), fault
    said = {end.rank: end.said for end in ends}
    if fault.where == "full disk":
        words = f"rank {fault.rank} cannot write .*/__{fault.rank}_0.distcp: .*File too large"
        assert re.search(words, said[0]), said[0][-2000:]
        return
    assert ends[fault.rank].code == -signal.SIGKILL
    survivors = [end.rank for end in ends if end.rank != fault.rank]
    assert all("by peer" in said[rank] for rank in survivors), said
    if fault.where in ("forward", "ring"):
        peer = fault.rank ^ 1
        phase = "forward" if fault.where == "forward" else "backward"
        words = (
            rf"HDP: rank {peer} waited [\d.]+ s for HDP rank {fault.rank % 2} \(rank {fault.rank}\)"
            rf" to \w+, in step (\d+), slot \d, layer \d, {phase}, ring \(\d, \d\)"
        )
        found = re.search(words, said[peer])
        assert found, said[peer][-2000:]
        for rank in survivors:  # its pipeline sibling waits in Megatron
            assert f"in step {found[1]} of train" in said[rank]


@pytest.mark.slow
def test_after_every_fault_the_run_goes_on_as_if_there_had_been_none(corpus, tmp_path):
    argv = _arguments(corpus, tmp_path / "whole", tmp_path / "whole-trace")
    whole = ends_of(lambda: _train(argv), RANKS)
    wanted = _sequences(tmp_path / "whole-trace")
    assert sorted(wanted) == list(range(STEPS))
    assert len(set(wanted.values())) == STEPS, "two steps have the same sequences"

    runs, save = [], tmp_path / "cut"
    for number, fault in enumerate(FAULTS):
        argv = _arguments(corpus, save, tmp_path / f"trace-{number}")
        _check_last_words(fault, ends_of(lambda: _train(argv, fault, number), RANKS))  # noqa: B023
        runs.append(_sequences(tmp_path / f"trace-{number}"))
    argv = _arguments(corpus, save, tmp_path / "trace-last")
    last = ends_of(lambda: _train(argv), RANKS)
    runs.append(_sequences(tmp_path / "trace-last"))

    _check_nothing_lost_or_repeated(runs, wanted)
    for one, other in zip(last, whole, strict=True):
        begin = min(runs[-1])
        assert one.result.losses == other.result.losses[begin:]
        assert one.result.grad_norms == other.result.grad_norms[begin:]
        for name, value in other.result.params.items():
            assert np.array_equal(one.result.params[name], value), name


def _check_nothing_lost_or_repeated(runs: list[dict[int, str]], wanted: dict[int, str]) -> None:
    """What counts of a run are its steps up to where the next one begins."""
    counted: list[int] = []
    runs = [run for run in runs if run]
    for run, following in zip(runs, [*runs[1:], {STEPS: ""}], strict=True):
        assert all(wanted[step] == sequences for step, sequences in run.items())
        begin, end = min(run), min(following)
        assert begin % 3 == 0
        assert end <= max(run) + 1, "a step that no run made was skipped"
        counted += range(begin, end)
    assert counted == list(range(STEPS))
