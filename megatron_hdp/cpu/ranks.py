# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Forked ranks: started with torchrun's environment, watched, and all gone at the end.

Each rank leads a process group of its own, so that what it started goes with it, and dies with its
parent. A store process binds a port that the kernel chooses before the first rank starts, so no
port is fixed and none can be taken in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

_ADDRESS = "127.0.0.1"
_STORE_TIMEOUT_S = 30.0
_STACKS_WAIT_S = 5.0
_STACKS_SETTLE_S = 0.3
_END_S = 10.0
_PR_SET_PDEATHSIG = 1


class Exit(NamedTuple):
    """How a rank ended."""

    rank: int
    code: int
    """Its exit code, or minus the signal that killed it."""


class _Child(NamedTuple):
    """A forked process, reaped only when `Ranks.end` has killed its process group."""

    rank: int
    pid: int
    pidfd: int


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun would set for a rank of one node, and one thread per rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        # As under torchrun, every rank is a client of a store that the launcher runs.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


class Ranks:
    """The ranks of one launch; a context that no rank outlives.

    Args:
        body: runs in every rank, with its number; returns the rank's exit code.
        nproc: how many ranks.
        folder: an existing folder, for the stacks of ranks that do not end.

    Raises:
        RuntimeError: this process has a process group or threads, which a fork would break.
    """

    def __init__(self, body: Callable[[int], int], nproc: int, folder: Path) -> None:
        _check_forkable()
        self._body, self._nproc, self._folder = body, nproc, folder
        self._store: _Child | None = None
        self._ranks: list[_Child] = []

    def __enter__(self) -> Ranks:
        try:
            self._store, port = _fork_store()
            for rank in range(self._nproc):
                self._ranks.append(_fork(rank, partial(self._run, rank, port)))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self.end()

    def _run(self, rank: int, port: int) -> int:
        os.environ.update(rank_environment(rank, self._nproc, port))
        faulthandler.register(signal.SIGUSR1, self._stacks(rank).open("w"))
        return self._body(rank)

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def wait(self, timeout_s: float | None, grace_s: float) -> list[Exit]:
        """Waits for the ranks; returns those that ended, in that order.

        Args:
            timeout_s: wait no longer than this; None waits for ever.
            grace_s: how long the others may take to end after the first that failed.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        ended: list[Exit] = []
        with selectors.DefaultSelector() as selector:
            for child in self._ranks:
                selector.register(child.pidfd, selectors.EVENT_READ, child)
            while len(ended) < self._nproc:
                left = deadline - time.monotonic()
                events = selector.select(None if left == float("inf") else max(0.0, left))
                if not events:
                    break
                for key, _ in events:
                    selector.unregister(key.fd)
                    ended.append(Exit(key.data.rank, _exit_code(key.data.pid)))
                    if ended[-1].code:
                        deadline = min(deadline, time.monotonic() + grace_s)
        return ended

    def send(self, signum: int) -> None:
        """Sends a signal to every rank that still runs."""
        for child in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signum)

    def stacks(self, ranks: list[int]) -> str:
        """Where the given ranks stand: the Python stack of each, all threads."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ranks[rank].pidfd, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_WAIT_S
        while not all(_written(self._stacks(rank)) for rank in ranks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(_STACKS_SETTLE_S)
        return "\n".join(f"rank {rank}:\n{_own_frames(self._stacks(rank))}" for rank in ranks)

    def end(self) -> None:
        """Kills what is left of the ranks, whatever they started, and the store. Idempotent."""
        children = [*self._ranks, *([self._store] if self._store else [])]
        self._ranks, self._store = [], None
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in children:
            _reap(child)


def _check_forkable() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "this process has made a process group, which forked ranks cannot share: start ranks "
            "before init_process_group, or from another process."
        )
    others = [thread.name for thread in threading.enumerate() if thread.ident != _own_thread()]
    if others:
        raise RuntimeError(
            f"this process has other threads ({', '.join(others)}), which do not survive a fork: "
            f"start ranks before they start, or after they have ended."
        )


def _own_thread() -> int | None:
    return threading.current_thread().ident


def _fork(rank: int, body: Callable[[], int]) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_child(parent, body)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # here too: whoever of the two comes first
    return _Child(rank, pid, os.pidfd_open(pid))


def _become_child(parent: int, body: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the parent's exit handlers are the parent's


def _fork_store() -> tuple[_Child, int]:
    """The process that holds the rendezvous store, and its port."""
    reader, writer = os.pipe()
    child = _fork(-1, lambda: _hold_store(writer))
    os.close(writer)
    with os.fdopen(reader) as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        port = pipe.readline() if selector.select(_STORE_TIMEOUT_S) else ""
    if not port:
        os.killpg(child.pid, signal.SIGKILL)
        _reap(child)
        raise RuntimeError(
            f"the ranks' store on {_ADDRESS} did not start within {_STORE_TIMEOUT_S:.0f} s: see "
            f"the error above."
        )
    return child, int(port)


def _hold_store(writer: int) -> int:
    from torch.distributed import TCPStore

    store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port}\n".encode())
    os.close(writer)
    while True:
        signal.pause()


def _reap(child: _Child) -> None:
    """Waits for a process that was killed; storage that is stuck can hold it back."""
    with selectors.DefaultSelector() as selector:
        selector.register(child.pidfd, selectors.EVENT_READ)
        ended = selector.select(_END_S)
    if ended:
        os.waitpid(child.pid, 0)
    else:
        what = f"rank {child.rank}" if child.rank >= 0 else "the ranks' store"
        sys.stderr.write(
            f"hdp: waited {_END_S:.0f} s for {what} (process {child.pid}) to end after SIGKILL; "
            f"going on without.\n"
        )
    os.close(child.pidfd)


def _exit_code(pid: int) -> int:
    """Of a process that has ended; leaves it to be reaped, so that its number is not reused."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _own_frames(path: Path) -> str:
    """The stacks in `path` without what the parent was doing when it forked."""
    if not path.exists():
        return "  (not started yet)"
    lines = path.read_text().splitlines()
    end = next((i for i, line in enumerate(lines) if line.endswith(" in _become_child")), None)
    return "\n".join(lines[:end])
