# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Runs in which something happens to the Ray loader's roles, and what is left of them after."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.harness import Recorded, pretrain

AtStep = Callable[[int, Any, Any], None]
"""(this rank, the PreparedStep, the Cluster or None); called when a training step begins."""


def pretrain_with(argv: list[str], at_step: AtStep) -> Recorded:
    """`pretrain`, in fp32."""
    from megatron_hdp.runtime import executor
    from megatron_hdp.runtime.session import current_session

    run = executor._StepRun.run

    def run_after(self, *args):
        if self.record.kind == "train":
            at_step(int(os.environ["RANK"]), self.step, current_session().loader_cluster)
        return run(self, *args)

    executor._StepRun.run = run_after
    return pretrain(argv, fp64=False)


def keep_ray_pids(cluster: Any, file: Path) -> None:
    """Of the Ray that this rank started: its keeper, daemons and roles."""
    head = psutil.Process(cluster._head._process.pid)
    pids = [process.pid for process in (head, *head.children(recursive=True))]
    file.write_text(json.dumps(pids))


def records(trace: Path) -> list[list[dict[str, Any]]]:
    """By rank, the training steps' records."""
    logs = sorted(trace.glob("rank*.jsonl"))
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    return [[record for record in own if record["kind"] == "train"] for own in lines]


def assert_gone(pids: Iterable[int], patience_s: float = 15.0) -> None:
    """None of the processes runs any more, or soon."""
    deadline = time.monotonic() + patience_s
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
