# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Who is asked, named and put to rest; with threads in place of Ray's actors."""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from megatron_hdp.data.remote import asking

PATIENCE_S = 0.2


@pytest.fixture
def pool(monkeypatch):
    """Calls run on its threads; `ray.wait` and `ray.get` look at their futures."""

    def ray_wait(futures, num_returns, timeout):
        ready = list(wait(futures, timeout, FIRST_COMPLETED).done)[:num_returns]
        return ready, [future for future in futures if future not in ready]

    class RayError(Exception):
        pass

    errors = SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))
    ray = SimpleNamespace(wait=ray_wait, get=lambda future: future.result(), exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(asking, "PATIENCE_S", PATIENCE_S)
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_slow_server_that_answers_first_is_named_once_and_rests(pool, caplog):
    delays = [1.75 * PATIENCE_S, 1.5 * PATIENCE_S, 0.0]
    actors = asking.Actors([0, 1, 2], "server", "rank 5", 10.0)

    def ask(first: int) -> asking.Answer:
        def call(number):
            return pool.submit(lambda: time.sleep(delays[number]) or number)

        return actors.ask(call, "read", first)

    with caplog.at_level(logging.WARNING):
        delays[1:] = [2.0, 2.0]
        assert ask(0) == (0, 1), "it was slow, and still the first"
        delays[1:] = [0.0, 0.0]
        assert ask(0) == (1, 0), "server 0 rests"
        delays[:] = [1.5 * PATIENCE_S, 2.0, 2.0]
        actors._rests_until = dict.fromkeys(range(3), time.monotonic() + 30)
        assert ask(0).value == 0
    said = [record.getMessage() for record in caplog.records]
    assert said == ["hdp: rank 5: the loader's server 0 did not answer in 0 s"]
