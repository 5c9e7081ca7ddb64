# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Real training from a real Ray: the local loader's run, also when servers and scheduler die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.drills import ends_of
from tests.e2e.harness import ROOT
from tests.e2e.ray_runs import assert_gone, keep_ray_pids, pretrain_with, records

RANKS, STEPS, CONTEXT, VOCABULARY = 4, 8, 1024, 512


@pytest.fixture
def code(megatron_on_cpu, tmp_path) -> str:
    """Prefix of a corpus as the quickstart builds it, with a shorter context."""
    prefix = tmp_path / "code"
    command = [
        sys.executable, str(ROOT / "tools" / "build_corpus.py"),
        "--input", sysconfig.get_paths()["stdlib"], "--pattern", "*.py", "--sample", "400",
        "--bpe-vocab-size", str(VOCABULARY), "--max-length", str(CONTEXT), "--too-long", "drop",
        "--output-prefix", str(prefix),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return str(prefix)


def _arguments(code: str, trace: Path, *more: str) -> list[str]:
    return [
        "--data-path", code, "--seq-length", str(CONTEXT), "--max-position-embeddings",
        str(CONTEXT), "--vocab-size", str(VOCABULARY), "--train-iters", str(STEPS), "--hdp",
        "--hdp-strategy", "naive", "--hdp-capacity", "300", "--hdp-timeout-minutes", "1.5",
        "--hdp-trace", str(trace), *more,
    ]  # fmt: skip


def _at_step(folder: Path, killed: dict[int, tuple[str, ...]]):
    """Rank 0 kills the roles of a step; every rank writes down which tokens it got."""

    def at_step(rank, prepared, cluster) -> None:
        if rank == 0 and cluster is not None:
            for role in cluster.roles():
                if role.name in killed.get(prepared.step, ()):
                    os.kill(role.pid, signal.SIGKILL)
            keep_ray_pids(cluster, folder / "pids")
        pieces = [piece for layout in prepared.layouts for piece in layout.pieces]
        with (folder / f"log-{rank}").open("a") as log:
            log.write(json.dumps([[prepared.step, *map(int, piece)] for piece in pieces]) + "\n")

    return at_step


def _assert_each_sequence_once(folder: Path) -> None:
    """Over all ranks and steps: the parts of a sequence are of one step and lie end to end."""
    parts = defaultdict(list)
    for log in sorted(folder.glob("log-*")):
        for line in log.read_text().splitlines():
            for step, sequence, start, stop in json.loads(line):
                parts[sequence].append((start, stop, step))
    assert len(parts) > STEPS
    assert any(len(found) > 1 for found in parts.values()), "no sequence was on a ring"
    for sequence, found in parts.items():
        found.sort()
        assert len({step for _, _, step in found}) == 1, f"{sequence} came twice"
        ends = [0, *(stop for _, stop, _ in found)]
        assert [start for start, _, _ in found] == ends[:-1], f"{sequence} has gaps or repeats"


@pytest.mark.slow
def test_it_trains_as_the_local_loader_does_though_its_roles_are_killed(code, tmp_path):
    argv = _arguments(code, tmp_path / "local")
    wanted = ends_of(lambda: pretrain_with(argv, lambda *_: None), RANKS)
    argv = _arguments(code, tmp_path / "ray", "--hdp-loader", "ray")
    kills = {2: ("server 0",), 4: ("server 1", "scheduler", "server 0")}
    at_step = _at_step(tmp_path, kills)
    got = ends_of(lambda: pretrain_with(argv, at_step), RANKS, timeout_s=200)

    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) > 5, "Ray's processes and the roles"
    assert_gone(pids)
    for one, other in zip(got, wanted, strict=True):
        assert one.code == 0, one.said[-3000:]
        assert one.result.losses == other.result.losses
        assert one.result.grad_norms == other.result.grad_norms
        for name, value in other.result.params.items():
            assert np.array_equal(one.result.params[name], value), name
    assert len(got[0].result.losses) == STEPS
    _assert_each_sequence_once(tmp_path)
    local, remote = records(tmp_path / "local"), records(tmp_path / "ray")
    sequences = [record["sequences"] for record in local[0]]
    assert len(set(sequences)) == STEPS, "two steps have the same sequences"
    for own, other in zip(remote, local, strict=True):
        assert [record["sequences"] for record in own] == sequences
        assert [record["slots"] for record in own] == [record["slots"] for record in other]
        for record in own:
            held = sum(slot["ring_tokens"] + slot["local_tokens"] for slot in record["slots"])
            assert record["loaded_tokens"] == held, "a rank was sent more than its own tokens"
            assert record["loaded_bytes"] == 12 * held
    assert sum(record["load_retries"] for own in remote for record in own) >= 2
    assert "the loader's server 0 had died" in "".join(one.said for one in got)
