# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Starts ranks on this machine: imports torch and Megatron once, then forks.

`python -m megatron_hdp.cpu.launch --nproc 4 script.py ARGUMENTS` is torchrun for CPU mode. For
tests, `run_ranks(function, 4)` forks ranks from the calling process and returns their results.
"""

from __future__ import annotations

import argparse
import os
import pickle
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_hdp.cpu.ranks import Exit, Ranks

_LAST_WORDS_S = 10.0


class RankFailedError(RuntimeError):
    """A rank ended with an exception, a signal or an exit code, or ran out of time."""


def run_ranks(
    function: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Calls `function(*args)` on `nproc` forked ranks and returns what each returned, by rank.

    The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...). The calling
    process should have imported torch and Megatron, which the ranks then share, and must have
    neither process groups nor threads. No rank outlives the call.

    Args:
        function: may be a closure; its result must be picklable.

    Raises:
        RankFailedError: the first failure, with that rank's traceback, or who did not end in
            `timeout_s` and where they stood; the other ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="hdp-ranks-") as name:
        folder = Path(name)
        with Ranks(partial(_save_outcome, function, args, folder), nproc, folder) as ranks:
            ended = ranks.wait(timeout_s, grace_s=0.0)
            failure = _first_failure(folder, ended)
            if failure:
                raise RankFailedError(failure)
            missing = sorted(set(range(nproc)) - {end.rank for end in ended})
            if missing:
                raise RankFailedError(
                    f"ranks {missing} did not end within {timeout_s:.0f} s; they stood in\n"
                    f"{ranks.stacks(missing)}"
                )
        return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(nproc)]


def _save_outcome(
    function: Callable[..., Any], args: Sequence[Any], folder: Path, rank: int
) -> int:
    try:
        result = _call(function, args)
        _result_file(folder, rank).write_bytes(pickle.dumps(result))
    except BaseException:
        _failure_file(folder, rank).write_text(traceback.format_exc())
        return 1
    return 0


def _call(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        return function(*args)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"


def _first_failure(folder: Path, ended: Sequence[Exit]) -> str | None:
    """What to say of the rank that failed first; None when none did.

    A rank that was killed comes before those that failed for want of it.
    """
    bad = [end for end in ended if end.code or not _result_file(folder, end.rank).exists()]
    if not bad:
        return None

    def moment(end: Exit) -> int:
        file = _failure_file(folder, end.rank)
        return file.stat().st_mtime_ns if file.exists() else 0

    first = min(bad, key=moment)
    file = _failure_file(folder, first.rank)
    if file.exists():
        return f"rank {first.rank} failed:\n{file.read_text()}"
    return f"rank {first.rank} died with {_described(first.code)}"


def _described(code: int) -> str:
    if code < 0:
        return f"{code} ({signal.Signals(-code).name})"
    return f"exit code {code}, without a result"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a script on forked ranks; the exit code is that of the first rank to fail."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hdp.cpu.launch", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="ranks to start")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.nproc < 1:
        raise SystemExit(f"--nproc {args.nproc}: start at least one rank.")
    if not os.path.isfile(args.script):
        raise SystemExit(f"{args.script}: no such script.")
    _import_once()
    with (
        tempfile.TemporaryDirectory(prefix="hdp-ranks-") as folder,
        Ranks(partial(_run_script, args), args.nproc, Path(folder)) as ranks,
    ):
        _pass_on_signals(ranks)
        ended = ranks.wait(timeout_s=None, grace_s=_LAST_WORDS_S)
    return _exit_code(ended, args.nproc)


def _import_once() -> None:
    import torch

    from megatron_hdp import cpu

    torch.set_num_threads(1)
    try:
        cpu.install()
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    import megatron.core.models.gpt
    import megatron.training.argument_utils  # noqa: F401


def _run_script(args: argparse.Namespace, rank: int) -> int:
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _pass_on_signals(ranks: Ranks) -> None:
    """The first Ctrl-C or SIGTERM goes to the ranks as SIGTERM, the next one ends this process."""

    def pass_on(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        ranks.send(signal.SIGTERM)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)


def _exit_code(ended: Sequence[Exit], nproc: int) -> int:
    for end in ended:
        if end.code:
            print(f"rank {end.rank} ended with {end.code}", file=sys.stderr)
    killed = sorted(set(range(nproc)) - {end.rank for end in ended})
    if killed:
        print(f"ranks {killed} were killed {_LAST_WORDS_S:.0f} s later", file=sys.stderr)
    first = next((end.code for end in ended if end.code), 0)
    return first if first >= 0 else 128 - first


if __name__ == "__main__":
    sys.exit(main())
