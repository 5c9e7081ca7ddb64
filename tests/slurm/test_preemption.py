# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The .sbatch files on a real SLURM: train, be preempted, requeue, finish; as if nothing had been.

Runs by itself, as root: ./scripts/test.sh -m slurm tests/slurm. Logs are kept in out/slurm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.harness import BASE, ROOT, SCRIPT
from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
KEPT = ROOT / "out" / "slurm"
RANKS, STEPS, PREEMPTED_AFTER = 4, 120, 8
OPTIONS = ("--requeue", "--nodes=2", "--gpus-per-node=2", "--time=8", "--export=ALL")
"""What the machine forces; the rest is what the files ask for."""


def _command(corpus: str, folder: Path) -> list[str]:
    return [
        str(SCRIPT), *BASE, "--data-path", corpus, "--train-iters", str(STEPS), "--hdp",
        "--hdp-cpu", "--hdp-capacity", "70", "--hdp-trace", str(folder / "trace"),
        "--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "1000",
        "--use-distributed-optimizer", "--context-parallel-size", str(RANKS),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory) -> dict[tuple[int, int], tuple[float, float]]:
    """Every (rank, step)'s loss of a run that nothing disturbs, without SLURM."""
    folder = tmp_path_factory.mktemp("whole")
    launch = [sys.executable, "-m", "megatron_hdp.cpu.launch", "--nproc", str(RANKS)]
    subprocess.run(
        [*launch, *_command(corpus, folder)], cwd=ROOT, check=True, capture_output=True, timeout=200
    )
    return _losses(folder / "trace")[0]


def _losses(trace: Path) -> tuple[dict[tuple[int, int], tuple[float, float]], Counter[int]]:
    """({(rank, step): (sum, tokens)}, how many ranks' records each training step has)."""
    losses, records = {}, Counter()
    for path in sorted(trace.glob("rank*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["kind"] == "train":
                losses[record["rank"], record["step"]] = record["loss_sum"], record["loss_tokens"]
                records[record["step"]] += 1
    return losses, records


def _submit(cluster: Cluster, style: str, command: list[str], log: Path) -> str:
    file = ROOT / "scripts" / "slurm" / f"{style}.sbatch"
    tasks = 1 if style == "torchrun" else 2
    return cluster.run(
        "sbatch", "--parsable", f"--chdir={ROOT}", f"--output={log}", *OPTIONS,
        f"--ntasks-per-node={tasks}", str(file), *command,
    ).strip()  # fmt: skip


def _urgent_job(cluster: Cluster, job: str) -> None:
    """SLURM itself preempts: it sends the job's --signal and gives it the partition's GraceTime."""
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true",
                "--output=/dev/null")  # fmt: skip


def _warning(cluster: Cluster, job: str) -> None:
    """What --signal=B:USR1@... does before the time limit."""
    cluster.run("scancel", "--batch", "--signal=USR1", job)


@pytest.mark.parametrize(
    ("style", "proctrack", "preempt"),
    [("torchrun", "pgid", _urgent_job), ("srun", "linuxproc", _warning)],
    ids=["torchrun, preempted by a job", "srun, warned of the time limit"],
)
def test_requeued_run_is_uninterrupted(
    corpus, uninterrupted, tmp_path, monkeypatch, style, proctrack, preempt
):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.chdir(ROOT)  # sbatch's submit directory
    log, trace = tmp_path / "job.log", tmp_path / "trace"
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,  # short, for the socket in it
        Cluster(Path(folder), proctrack) as cluster,
        ExitStack() as kept,
    ):
        job = _submit(cluster, style, _command(corpus, tmp_path), log)

        def told() -> str:
            text = log.read_text() if log.exists() else "(no log of the job)"
            return f"{cluster.job(job)}\n{text[-6000:]}\n{cluster.logs()}"

        def step_is_done() -> bool:
            return _losses(trace)[1][PREEMPTED_AFTER] == RANKS

        kept.callback(lambda: _keep(style, log, cluster))
        wait_until(step_is_done, 120, f"step {PREEMPTED_AFTER} was not reached", told)
        preempt(cluster, job)

        def ended() -> bool:
            return cluster.job(job)["JobState"] not in (
                "PENDING",
                "RUNNING",
                "COMPLETING",
                "REQUEUED",
            )

        wait_until(ended, 200, "the job did not end", told)
        end = cluster.job(job)
        assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), told()
    text = log.read_text()
    assert text.count("exiting program after receiving SIGTERM") == 1, text
    assert f"job {job} got SIGUSR1" in text
    losses, records = _losses(trace)
    assert records == {step: RANKS for step in range(STEPS)}, "a step was lost or run twice"
    assert losses == uninterrupted, "bitwise"
    saved = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    with (KEPT / f"{style}.log").open("a") as file:
        print(*_table(losses, uninterrupted, saved), sep="\n", file=file)
    print("", *_table(losses, uninterrupted, saved), sep="\n")


def _keep(style: str, log: Path, cluster: Cluster) -> None:
    """What the job and SLURM's daemons said, whatever comes of it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    said = log.read_text() if log.exists() else "(no log of the job)\n"
    (KEPT / f"{style}.log").write_text(f"{said}\n{cluster.logs()}\n")


def _table(requeued: dict, uninterrupted: dict, saved: int) -> list[str]:
    """Both runs' losses per token of some steps, and how far they are apart at most."""

    def loss(run: dict, step: int) -> float:
        sums = np.array([run[rank, step] for rank in range(RANKS)])
        return float(sums[:, 0].sum() / sums[:, 1].sum())

    worst = max(abs(loss(requeued, step) - loss(uninterrupted, step)) for step in range(STEPS))
    shown = sorted({0, PREEMPTED_AFTER, STEPS // 2, STEPS - 1})
    return [
        "step   uninterrupted   requeued",
        *(f"{s:4d}   {loss(uninterrupted, s):.9f}   {loss(requeued, s):.9f}" for s in shown),
        f"largest difference of {STEPS} steps: {worst}; last checkpoint at {saved}",
    ]
