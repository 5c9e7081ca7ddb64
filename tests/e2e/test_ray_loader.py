# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Real training from a real Ray: the local loader's run, also when servers and scheduler die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.e2e.drills import ends_of
from tests.e2e.harness import Recorded, pretrain

RANKS, STEPS = 4, 8


def _arguments(corpus: str, trace: Path, *more: str) -> list[str]:
    return [
        "--data-path", corpus, "--train-iters", str(STEPS), "--hdp", "--hdp-strategy", "naive",
        "--hdp-capacity", "100", "--hdp-timeout-minutes", "1.5", "--hdp-trace", str(trace), *more,
    ]  # fmt: skip


def _train(argv: list[str], killed: dict[int, tuple[str, ...]], left: Path) -> Recorded:
    """Rank 0 kills the named roles when it begins the given steps, and lists Ray's processes."""
    if killed and os.environ["RANK"] == "0":
        from megatron_hdp.runtime import executor
        from megatron_hdp.runtime.session import current_session

        run = executor._StepRun.run

        def run_after_kills(self, *args):
            if self.record.kind == "train":
                cluster = current_session().loader_cluster
                for role in cluster.roles():
                    if role.name in killed.get(self.step.step, ()):
                        os.kill(role.pid, signal.SIGKILL)
                head = psutil.Process(cluster._head._process.pid)
                pids = [process.pid for process in (head, *head.children(recursive=True))]
                left.write_text(json.dumps(pids))
            return run(self, *args)

        executor._StepRun.run = run_after_kills
    return pretrain(argv, fp64=False)


def _records(trace: Path) -> list[list[dict]]:
    """By rank, the training steps' records."""
    logs = sorted(trace.glob("rank*.jsonl"))
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    return [[record for record in own if record["kind"] == "train"] for own in lines]


def _assert_gone(pids: list[int], patience_s: float = 15.0) -> None:
    deadline = time.monotonic() + patience_s
    assert len(pids) > 5, "Ray's processes and the roles"
    while left := [pid for pid in pids if psutil.pid_exists(pid) and _runs(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_it_trains_as_the_local_loader_does_though_its_roles_are_killed(corpus, tmp_path):
    argv = _arguments(corpus, tmp_path / "local")
    wanted = ends_of(lambda: _train(argv, {}, tmp_path / "none"), RANKS)
    argv = _arguments(corpus, tmp_path / "ray", "--hdp-loader", "ray")
    kills = {2: ("server 0",), 4: ("server 1", "scheduler", "server 0")}
    got = ends_of(lambda: _train(argv, kills, tmp_path / "pids"), RANKS, timeout_s=200)

    _assert_gone(json.loads((tmp_path / "pids").read_text()))
    for one, other in zip(got, wanted, strict=True):
        assert one.code == 0, one.said[-3000:]
        assert one.result.losses == other.result.losses
        assert one.result.grad_norms == other.result.grad_norms
        for name, value in other.result.params.items():
            assert np.array_equal(one.result.params[name], value), name
    local, remote = _records(tmp_path / "local"), _records(tmp_path / "ray")
    sequences = [record["sequences"] for record in local[0]]
    assert len(set(sequences)) == STEPS, "two steps have the same sequences"
    for own, other in zip(remote, local, strict=True):
        assert [record["sequences"] for record in own] == sequences
        assert [record["slots"] for record in own] == [record["slots"] for record in other]
        for record in own:
            held = sum(slot["ring_tokens"] + slot["local_tokens"] for slot in record["slots"])
            assert record["loaded_tokens"] == held, "a rank was sent more than its own tokens"
            assert record["loaded_bytes"] == 12 * held
    assert sum(record["load_retries"] for own in remote for record in own) >= 2
