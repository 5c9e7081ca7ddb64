# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Starts ranks on this machine: imports once, then forks them.

`python -m megatron_hdp.cpu.launch --nproc 4 script.py ARGUMENTS` sets what torchrun sets. For
tests, `run_ranks(function, 4)` forks ranks from the calling process and returns their results.
"""

from __future__ import annotations

import argparse
import os
import pickle
import runpy
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RankFailedError(RuntimeError):
    """A rank ended with an exception, a signal or an exit code, or ran out of time."""


@dataclass
class _Rank:
    """A forked rank, seen from the parent."""

    rank: int
    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)


def run_ranks(
    function: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Calls `function(*args)` on `nproc` forked ranks and returns what each returned.

    The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). The caller must
    not have made a process group, and should have imported torch and Megatron, which the ranks
    then share. No rank outlives the call.

    Args:
        function: its result must be picklable.

    Raises:
        RankFailedError: the first failure, with that rank's traceback; the others are killed.
    """
    with tempfile.TemporaryDirectory(prefix="hdp-ranks-") as folder:
        port = _free_port()
        ranks = [_fork(function, args, rank, nproc, port, folder) for rank in range(nproc)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            _kill(ranks)


def _free_port() -> int:
    """A port that rank 0's store binds; the kernel does not hand it out again for a while."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun would set, and one thread per rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def _fork(
    function: Callable[..., Any], args: Sequence[Any], rank: int, nproc: int, port: int, folder: str
) -> _Rank:
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Rank(rank, pid, reader)
    os.close(reader)
    code = 1
    try:
        os.environ.update(rank_environment(rank, nproc, port))
        payload = _outcome(function, args)
        code = 0 if payload[0] == "result" else 1
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(payload, stream)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # a fork must not run the parent's exit handlers


def _outcome(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    try:
        return "result", function(*args)
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return "result", None
        return "failure", f"SystemExit: {exit_.code}"
    except BaseException:
        return "failure", traceback.format_exc()


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while len(results) < len(ranks):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                waiting = [rank.rank for rank in ranks if rank.rank not in results]
                raise RankFailedError(f"ranks {waiting} did not end within {timeout_s:.0f} s")
            for key, _ in events:
                rank = key.data
                chunk = os.read(rank.pipe, 1 << 20)
                if chunk:
                    rank.received += chunk
                    continue
                selector.unregister(rank.pipe)
                results[rank.rank] = _result(rank)
    return [results[rank.rank] for rank in ranks]


def _result(rank: _Rank) -> Any:
    if not rank.received:
        _, status = os.waitpid(rank.pid, 0)
        rank.pid = 0
        raise RankFailedError(
            f"rank {rank.rank} died with {os.waitstatus_to_exitcode(status)} "
            f"(a negative number is a signal)"
        )
    kind, value = pickle.loads(bytes(rank.received))
    if kind == "failure":
        raise RankFailedError(f"rank {rank.rank} failed:\n{value}")
    return value


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        os.close(rank.pipe)
        if rank.pid:
            try:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a script on forked ranks; the exit code is that of the first rank to fail."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hdp.cpu.launch", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="ranks to start")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.nproc < 1:
        raise SystemExit(f"--nproc {args.nproc}: start at least one rank.")
    import torch

    from megatron_hdp import cpu

    torch.set_num_threads(1)
    cpu.install()
    port = _free_port()
    pids = {_fork_script(args, rank, port): rank for rank in range(args.nproc)}
    return _wait(pids)


def _fork_script(args: argparse.Namespace, rank: int, port: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(rank_environment(rank, args.nproc, port))
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    code = 1
    try:
        runpy.run_path(args.script, run_name="__main__")
        code = 0
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        else:
            code = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: dict[int, int]) -> int:
    """Waits for all; after the first failure the others get ten seconds to say why they ended."""
    first_code = 0
    deadline = float("inf")
    while pids:
        pid, status = os.waitpid(-1, 0 if deadline == float("inf") else os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.05)
            continue
        rank = pids.pop(pid, -1)
        code = os.waitstatus_to_exitcode(status)
        if code and not first_code:
            first_code = code if code > 0 else 128 - code
            print(f"rank {rank} ended with {code}", file=sys.stderr)
            deadline = time.monotonic() + 10.0
    return first_code


if __name__ == "__main__":
    sys.exit(main())
