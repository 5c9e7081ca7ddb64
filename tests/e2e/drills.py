# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Runs ranks of which some are to fail, and says how each of them ended."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megatron_hdp.cpu.ranks import Ranks


class End(NamedTuple):
    """How one rank ended, by itself."""

    rank: int
    code: int
    """Its exit code, or minus the signal that killed it."""
    said: str
    """All that it wrote to stdout and stderr."""
    result: Any
    """What the function returned; None when it did not."""


def ends_of(function: Callable[[], Any], nproc: int, timeout_s: float = 60.0) -> list[End]:
    """Calls `function()` on forked ranks, none of which is ended from outside.

    Fails the test when a rank, or a process that a rank started, is still there at the end.
    """
    with tempfile.TemporaryDirectory(prefix="hdp-drill-") as name:
        folder = Path(name)
        with Ranks(partial(_run, function, folder), nproc, folder) as ranks:
            children = [child.pid for child in ranks._ranks]
            ended = ranks.wait(timeout_s, grace_s=timeout_s)
            left = sorted(set(range(nproc)) - {end.rank for end in ended})
            assert not left, f"ranks {left} hang in\n{ranks.stacks(left)}"
            _assert_nothing_left(children)
        return [_end(folder, rank, code) for rank, code in sorted(ended)]


def _run(function: Callable[[], Any], folder: Path, rank: int) -> int:
    log = (folder / f"said-{rank}").open("a", buffering=1)
    os.dup2(log.fileno(), 1)  # for what C++ writes at an abort
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log  # pytest's own write past the descriptors
    logging.getLogger().handlers.clear()  # pytest's keep to themselves what is logged
    try:
        result = function()
    except SystemExit as end:
        print(end)
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    return 0


def _end(folder: Path, rank: int, code: int) -> End:
    said, result = folder / f"said-{rank}", folder / f"result-{rank}"
    return End(
        rank,
        code,
        said.read_text() if said.exists() else "",
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _assert_nothing_left(groups: list[int], patience_s: float = 10.0) -> None:
    """What a rank started (its planning process) ends with it."""
    deadline = time.monotonic() + patience_s
    while left := _alive_in(groups):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _alive_in(groups: list[int]) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.info['cmdline']}")
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
