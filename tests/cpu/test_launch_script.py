# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_hdp.cpu.launch`, and torchrun in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_hdp.cpu.launch import main, run_ranks

LAUNCH = [sys.executable, "-W", "ignore", "-m", "megatron_hdp.cpu.launch", "--nproc"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node"]  # fmt: skip

MEET = """
import sys
from megatron_hdp import cpu
cpu.install()
import torch
import megatron.core
import beside
torch.distributed.init_process_group("gloo")
total = torch.ones(1, device="cuda")
torch.distributed.all_reduce(total)
if torch.distributed.get_rank() == 0:
    print("met", int(total), sys.argv[1:], beside.NAME, __name__)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def launch(megatron_on_cpu, tmp_path):
    """The launcher's (exit code, stdout, stderr), in a fork that has Megatron imported already."""
    streams = [tmp_path / "stdout", tmp_path / "stderr"]

    def run(*argv: str) -> int:
        for descriptor, path in enumerate(streams, start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
        try:
            return main(argv)
        except SystemExit as end:
            print(end.code, file=sys.stderr)
            return 1

    def run_in_fork(*argv: str) -> tuple[int, str, str]:
        (code,) = run_ranks(run, 1, *argv)
        return code, *(path.read_text() for path in streams)

    return run_in_fork


def test_script_sees_what_torchrun_gives(script):
    path = script(MEET)
    ran = _run([*LAUNCH, "2", path, "--flag", "--nproc", "7"])
    assert ran.returncode == 0, ran.stderr
    assert "met 2 ['--flag', '--nproc', '7'] beside __main__" in ran.stdout


@pytest.mark.slow
def test_torchrun_serves_as_well(script):
    ran = _run([*TORCHRUN, "2", script(MEET), "--flag"])
    assert ran.returncode == 0, ran.stderr
    assert "met 2 ['--flag'] beside __main__" in ran.stdout


FAIL = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {failure}
time.sleep({sleep})
"""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with 3"),
        ("sys.exit('--flag 7: no')", 1, "--flag 7: no"),
        ("raise ValueError('planted')", 1, "ValueError: planted"),
        ("os.kill(os.getpid(), signal.SIGABRT)", 134, "rank 1 ended with -6"),
    ],
    ids=["code", "sentence", "exception", "signal"],
)
def test_exit_code_is_that_of_the_first_failure(launch, script, failure, code, words):
    path = script(FAIL.format(failure=failure, sleep=0.5))
    got, _, stderr = launch("--nproc", "2", path)
    assert got == code
    assert words in stderr


@pytest.mark.slow
def test_the_others_are_killed_in_the_end(launch, script):
    path = script(FAIL.format(failure="sys.exit(3)", sleep=300))
    code, _, stderr = launch("--nproc", "2", path)
    assert code == 3
    assert "ranks [0] were killed 10 s later" in stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["0", __file__], "--nproc 0"), (["2", "/nowhere.py"], "/nowhere.py: no such script")],
)
def test_bad_arguments_are_one_sentence(launch, arguments, words):
    code, _, stderr = launch("--nproc", *arguments)
    assert code == 1
    assert words in stderr
    assert len(stderr.strip().splitlines()) == 1


WAIT = """
import os, pathlib, time
pathlib.Path(__file__).with_name(os.environ["RANK"]).touch()
time.sleep(300)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(script, signum):
    path = Path(script(WAIT))
    launcher = subprocess.Popen([*LAUNCH, "2", str(path)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (path.with_name("0").exists() and path.with_name("1").exists()):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) == 3, "two ranks and their store"
        os.kill(launcher.pid, signum)
        code = launcher.wait(timeout=30)
        assert code == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive
    finally:
        launcher.kill()
        launcher.wait()
