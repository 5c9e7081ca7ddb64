# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Forked ranks: results, the first failure, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from megatron_hdp.cpu.launch import RankFailedError, run_ranks


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"left running: {left}"


def _gathered(factor: int) -> list[int]:
    dist.init_process_group("gloo")
    ranks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ranks, factor * dist.get_rank())
    return ranks


@pytest.mark.parametrize("nproc", [1, 4])
def test_ranks_meet_and_results_come_back(nproc):
    assert run_ranks(_gathered, nproc, 10) == [[10 * rank for rank in range(nproc)]] * nproc


def test_results_are_in_the_order_of_ranks():
    def late_first() -> int:
        rank = int(os.environ["RANK"])
        time.sleep(0.2 * (2 - rank))
        return rank

    assert run_ranks(late_first, 3) == [0, 1, 2]


def test_large_results():
    assert run_ranks(lambda: b"x" * 10_000_000, 2) == [b"x" * 10_000_000] * 2


def test_first_failure_is_reported_and_not_those_that_follow():
    def fail() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("planted")
        dist.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 failed:(.|\n)*ValueError: planted"):
        run_ranks(fail, 3)


def test_killed_rank_is_named_rather_than_those_it_leaves_alone():
    def die() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailedError, match=r"rank 2 died with -9 \(SIGKILL\)"):
        run_ranks(die, 3)


def test_exit_codes():
    assert run_ranks(lambda: sys.exit(0), 1) == [None]
    with pytest.raises(RankFailedError, match="SystemExit: no such flag"):
        run_ranks(lambda: sys.exit("no such flag"), 1)
    with pytest.raises(RankFailedError, match="exit code 0, without a result"):
        run_ranks(lambda: os._exit(0), 1)


def test_unpicklable_result_is_a_failure():
    with pytest.raises(RankFailedError, match="pickle"):
        run_ranks(lambda: threading.Lock(), 1)


def _stand_still() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def test_timeout_says_who_stood_where():
    began = time.monotonic()
    with pytest.raises(RankFailedError) as failure:
        run_ranks(_stand_still, 2, timeout_s=5)
    assert time.monotonic() - began < 20
    message = str(failure.value)
    assert message.startswith("ranks [0, 1] did not end within 5 s")
    assert "in barrier" in message
    assert "in _stand_still" in message
    assert "test_timeout_says_who_stood_where" not in message, "the parent's frames are noise"


def test_what_a_rank_started_ends_with_it():
    def start() -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    (pid,) = run_ranks(start, 1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_parent_with_threads_or_a_group_is_refused():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy")
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"other threads \(busy\)"):
            run_ranks(lambda: None, 1)
    finally:
        done.set()
        thread.join()

    def nested() -> None:
        dist.init_process_group("gloo")
        run_ranks(lambda: None, 1)

    with pytest.raises(RankFailedError, match="has made a process group"):
        run_ranks(nested, 1)


def test_many_launches_at_once_do_not_meet():
    """Every launch has a store and a port of its own."""

    def launch() -> list[list[int]]:
        return run_ranks(_gathered, 2, int(os.environ["RANK"]))

    assert run_ranks(launch, 3) == [[[0, n], [0, n]] for n in range(3)]
