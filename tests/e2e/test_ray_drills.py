# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The Ray loader on a joined cluster, on text, resumed, with a hung server, with a cut file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.data.texts import FIRST_BYTE, byte_vocabulary, write
from tests.e2e.drills import ends_of
from tests.e2e.ray_runs import assert_gone, keep_ray_pids, pretrain_with, records

RANKS = 2


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.fixture
def cluster(megatron_on_cpu, monkeypatch):
    """(address, process) of a Ray that somebody else started with `ray start`, with a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp(prefix="hdp-", dir="/tmp"))  # sockets' paths must be short
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", "0",
        "--ray-client-server-port", _free_port(), "--dashboard-agent-listen-port", _free_port(),
        "--include-dashboard", "false", "--num-cpus", "4", "--temp-dir", str(folder),
        "--object-store-memory", str(128 << 20), "--node-ip-address", "127.0.0.1",
        "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / "said").open("w") as said:
        process = psutil.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        deadline, known = time.monotonic() + 60, folder / "ray_current_cluster"
        while not known.exists() or not known.read_text():
            assert process.poll() is None, (folder / "said").read_text()
            assert time.monotonic() < deadline, (folder / "said").read_text()
            time.sleep(0.1)
        yield known.read_text().strip(), process
    finally:
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _roles(cluster: psutil.Process) -> list[int]:
    named = []
    for process in cluster.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(role in " ".join(process.cmdline()) for role in ("ray::Server", "ray::Sched")):
                named.append(process.pid)
    return named


def _text_arguments(folder: Path, run: str, *more: str) -> list[str]:
    """Compressed documents, one line of which is broken, and chats."""
    rng = np.random.RandomState(4)

    def text(most: int) -> str:
        return "".join(map(chr, rng.randint(97, 123, rng.randint(1, most))))

    web: list = [{"text": text(250)} for _ in range(70)]
    web[40] = '{"text": "brok'
    turns = ("user", "assistant")
    chats = [{"messages": [{"role": r, "content": text(60)} for r in turns]} for _ in range(50)]
    blend = ["0.7", write(folder / "web.jsonl.zst", web), "0.3", write(folder / "c.jsonl", chats)]
    return [
        "--data-path", *blend, "--data-cache-path", str(folder / f"cache-{run}"),
        "--tokenizer-type", "TikTokenizer", "--tokenizer-model", byte_vocabulary(folder),
        "--tiktoken-num-special-tokens", str(FIRST_BYTE), "--vocab-size", str(256 + FIRST_BYTE),
        "--train-iters", "6", "--hdp", "--hdp-capacity", "128", "--hdp-malformed-records", "skip",
        "--hdp-trace", str(folder / f"trace-{run}"), "--eval-iters", "0",
        "--hdp-timeout-minutes", "1.5", *more,
    ]  # fmt: skip


def _losses(folder: Path, *runs: str) -> list[list[tuple]]:
    """By rank: (step, sequences, loss, tokens), of later runs where a step came again."""
    found: list[dict[int, tuple]] = [{} for _ in range(RANKS)]
    for run in runs:
        for steps, own in zip(found, records(folder / f"trace-{run}"), strict=True):
            keys = "step", "sequences", "loss_sum", "loss_tokens"
            steps |= {record["step"]: tuple(record[key] for key in keys) for record in own}
    return [[steps[step] for step in sorted(steps)] for steps in found]


@pytest.mark.slow
def test_text_from_a_joined_cluster_with_a_hung_server_killed_and_resumed(cluster, tmp_path):
    address, process = cluster
    argv = _text_arguments(tmp_path, "local")
    local = ends_of(lambda: pretrain_with(argv, lambda *_: None), RANKS)
    assert [end.code for end in local] == [0] * RANKS, local[0].said[-3000:]

    def hang_and_die(rank, prepared, roles) -> None:
        if (rank, prepared.step) == (0, 0):
            status = {role.name: role for role in roles.roles()}
            os.kill(status["server 0"].pid, signal.SIGSTOP)
        if (rank, prepared.step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)

    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval",
            "3", "--ckpt-format", "torch_dist"]  # fmt: skip
    on_ray = ["--hdp-loader", "ray", "--hdp-ray-address", address]
    first = _text_arguments(tmp_path, "first", *save, *on_ray)
    died = ends_of(lambda: pretrain_with(first, hang_and_die), RANKS, timeout_s=100)
    assert died[1].code == -signal.SIGKILL
    assert died[0].code not in (0, None)
    said = died[0].said
    assert "rank 0: the loader's server 0 did not answer in 2 s" in said, said[-3000:]
    assert said.count("1 malformed records left out, the first at line 41") == 1
    assert_gone(_roles(process))

    second = _text_arguments(tmp_path, "second", *save, *on_ray, "--hdp-loader-servers", "1")
    resumed = ends_of(lambda: pretrain_with(second, lambda *_: None), RANKS, timeout_s=100)
    assert [end.code for end in resumed] == [0] * RANKS, resumed[0].said[-3000:]
    assert_gone(_roles(process))
    assert process.is_running(), "a cluster that was joined is left as it was"

    wanted = _losses(tmp_path, "local")
    assert [step[0] for step in wanted[0]] == list(range(6))
    assert [step[0] for step in _losses(tmp_path, "second")[0]] == [3, 4, 5]
    assert _losses(tmp_path, "first", "second") == wanted
    assert sum(r["load_retries"] for own in records(tmp_path / "trace-first") for r in own) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["local", "ray"])
def test_a_file_that_is_cut_short_under_a_run_is_named_by_every_rank(corpus, tmp_path, loader):
    """Only the rank that is given the last token comes to miss it; the other one hears of it."""
    for kind in ("bin", "idx"):
        shutil.copy(f"{corpus}.{kind}", tmp_path / f"short.{kind}")
    whole = (tmp_path / "short.bin").stat().st_size

    def cut_short(rank, prepared, roles) -> None:
        if rank == 0:
            if roles is not None:
                keep_ray_pids(roles, tmp_path / "pids")
            if prepared.step == 1:
                os.truncate(tmp_path / "short.bin", whole - 4)

    argv = ["--data-path", str(tmp_path / "short"), "--train-iters", "50", "--hdp",
            "--hdp-capacity", "128", "--hdp-timeout-minutes", "0.5", "--hdp-loader", loader,
            "--hdp-loader-servers", "1"]  # fmt: skip
    begun = time.monotonic()
    ends = ends_of(lambda: pretrain_with(argv, cut_short), RANKS, timeout_s=120)
    assert time.monotonic() - begun < 90
    for end in ends:
        assert end.code not in (0, None)
        assert f"cannot be read from {tmp_path / 'short'}.bin" in end.said, end.said[-3000:]
    assert sum("RankFailed: HDP cannot prepare step" in end.said for end in ends) == 1
    if loader == "ray":
        pids = json.loads((tmp_path / "pids").read_text())
        assert len(pids) > 4
        assert_gone(pids)
