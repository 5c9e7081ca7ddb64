# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The loader's parts by themselves: prefetching, questions to servers, planning, Ray's keeper."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron_hdp.data.loading.prefetch import Prefetch
from megatron_hdp.runtime.loader_support import loader_refusals


def test_prefetch_keeps_order_and_its_bound():
    begun, gate = [], threading.Semaphore(0)

    def work(step: int) -> int:
        begun.append(step)
        gate.acquire()
        if step == 12:
            raise ValueError("step 12")
        return 10 * step

    prefetch = Prefetch("test", work, lambda step: step < 14, depth=2)
    gate.release(100)
    assert prefetch.get(10, 5.0) == 100
    _until(lambda: begun == [10, 11, 12])
    time.sleep(0.05)
    assert begun == [10, 11, 12], "more than two steps ahead"
    assert prefetch.get(11, 5.0) == prefetch.get(11, 5.0) == 110
    with pytest.raises(ValueError, match="step 12"):
        prefetch.get(12, 5.0)
    assert prefetch.get(13, 5.0) == 130
    prefetch.close()
    assert begun == [10, 11, 12, 13], "nothing is begun past the last step"


def test_prefetch_says_when_nothing_comes():
    prefetch = Prefetch("test", lambda step: time.sleep(1.0), lambda step: True, depth=0)
    with pytest.raises(TimeoutError):
        prefetch.get(0, 0.05)
    prefetch.close()


def _until(condition, patience_s: float = 5.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        ({"hdp_loader_servers": 0}, {}, ["--hdp-loader-servers 0", "at least 1"]),
        ({"hdp_ray_address": "ray://a:1"}, {}, ["ray://a:1", "nothing answers"]),
        ({"hdp_ray_address": "auto"}, {}, ["--hdp-ray-address auto", "host:port"]),
        ({}, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, ["16 ranks", "--hdp-ray-address"]),
        ({"missing": True}, {}, ["Ray is not installed", "--hdp-loader local"]),
    ],
)
def test_what_ray_needs_is_said_before_anything_starts(monkeypatch, given, environment, words):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (
            (None if given.get("missing") else find("json")) if name == "ray" else find(name)
        ),
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = {"hdp_loader": "ray", "hdp_ray_address": None, "hdp_loader_servers": 2} | given
    (sentence,) = loader_refusals(argparse.Namespace(**settings))
    for word in words:
        assert word in sentence
    assert "ray" not in sys.modules or given == {}, "a check must not import Ray"


_OWNER = """
import sys, time
from megatron_hdp.data.remote.cluster import _own_environment
from megatron_hdp.data.remote.head import Head
import os
os.environ.update(_own_environment())
head = Head(2, 60.0)
print(head._process.pid, head._folder, flush=True)
time.sleep(100)
"""


@pytest.mark.slow
def test_ray_ends_with_a_killed_owner_and_leaves_nothing():
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    pid, folder = owner.stdout.readline().split()
    keeper = psutil.Process(int(pid))
    started = [keeper, *keeper.children(recursive=True)]
    assert len(started) > 3
    for asked in (signal.SIGTERM, signal.SIGUSR1):  # what comes to every process of a job
        for process in started:
            process.send_signal(asked)
    time.sleep(0.5)
    assert all(process.is_running() for process in started)
    owner.kill()
    owner.wait()
    _until(lambda: not any(_runs(process) for process in started), 20.0)
    _until(lambda: not os.path.exists(folder))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
