# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The simulator against real runs on this machine's CPU: profile, train, simulate the same plans.

Busy time is the CPU time of a rank's process during Megatron's schedule. Neighbours on a shared
machine change what a CPU second is worth, so predictions are scaled by a fixed piece of work that
the profile timed and that every rank times again after every step; the scale is in the result.
Order is compared on the wall clock.

    python scripts/benchmarks/simulator_check.py    # writes results/simulator-check.json
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp import cpu
from megatron_hdp.planning import Plan
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.simulation import Cluster, Job, Simulation, simulate
from megatron_hdp.simulation.work import Work

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).parent / "results" / "simulator-check.json"
CONTEXT, STEPS, WARM_UP = 4096, 8, 2
STRATEGIES = ("auto", "naive", "static")
APART = 0.05
"""Events count as ordered when the simulation has them this share of the step apart."""
MODEL = f"""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 512 --seq-length {CONTEXT}
    --max-position-embeddings {CONTEXT} --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 4096 --tokenizer-type NullTokenizer
    --use-distributed-optimizer
""".split()
Row = dict[str, Any]


def write_corpus(prefix: Path) -> None:
    """Documents of random tokens: many short ones, a tenth of the context length."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.RandomState(0)
    lengths = np.minimum(rng.lognormal(6.0, 1.0, 3000).astype(int) + 8, CONTEXT)
    lengths[::25] = CONTEXT
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in lengths.tolist():
        builder.add_item(torch.from_numpy(np.append(rng.randint(0, 4000, length - 1), 4095)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def profile(ranks: int, path: Path) -> Row:
    """`python -m megatron_hdp profile` of the same launch line on as many ranks."""
    command = [
        sys.executable, "-W", "ignore", "-m", "megatron_hdp", "profile", "--hdp-cpu", "--nproc",
        str(ranks), "--output", str(path), "--repeats", "3", *MODEL,
        "--context-parallel-size", str(ranks),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(path.read_text())["measured"]
    assert isinstance(found, dict)
    return found


def train(ranks: int, strategy: str, corpus: Path, profile_path: Path) -> list[Row]:
    """Every training step's plan and the ranks' records, from Megatron's own loop."""
    from megatron_hdp.cpu.launch import run_ranks

    argv = [
        *MODEL, "--data-path", str(corpus), "--split", "98,1,1", "--micro-batch-size", "1",
        "--global-batch-size", str(3 * ranks // 2), "--train-iters", str(STEPS), "--lr", "1e-3",
        "--lr-decay-style", "constant", "--eval-iters", "1", "--eval-interval", "1000",
        "--log-interval", "1", "--context-parallel-size", str(ranks), "--hdp", "--hdp-cpu",
        "--hdp-strategy", strategy, "--hdp-profile", str(profile_path), "--logging-level", "40",
    ]  # fmt: skip

    def body() -> list[tuple[Plan, Row]]:
        import megatron_hdp.observability.step_log as module
        from megatron_hdp.runtime.profiling.reference import reference_s

        step_log: Any = module
        seen: list[tuple[Plan, Row]] = []

        def keep(session: Any, iteration: int, first: bool) -> None:
            record = {**asdict(session.last_record), "reference_s": reference_s()}
            seen.append((session.last_plan, record))

        step_log.StepLog = lambda: keep
        script = str(ROOT / "scripts" / "pretrain_gpt.py")
        sys.argv = [script, *argv]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runpy.run_path(script, run_name="__main__")
        return seen

    found = run_ranks(body, ranks, timeout_s=280.0)
    return [
        {"plan": steps[0][0], "records": [record for _, record in steps]}
        for steps in zip(*found, strict=True)
    ]


def compare(step: Row, profiled: Profiled) -> Row:
    """One step: predicted over measured busy time of every rank, and the order of forwards."""
    cost, sync_s = profiled.cost, profiled.sync_s
    cluster = replace(
        Cluster.of(cost), ring_overlap=profiled.overlap,
        cores_per_node=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    plan, records = step["plan"], step["records"]
    work = Work.build(plan, cost, 1, cluster.ring_overlap)
    predicted = np.add.reduceat(work.alone_s, plan.first_micro_batch[:-1]) + sync_s
    measured = np.array([record["busy_s"] for record in records])
    errors = predicted / measured - 1
    slowest = int(measured.argmax())
    simulation = simulate(plan, Job(cost), cluster)
    agreeing, pairs = order(simulation, records)
    wall = max(r["end_s"] for r in records) - min(r["begin_s"] for r in records)
    return {
        "busy_predicted_s": predicted.round(4).tolist(),
        "busy_measured_s": measured.round(4).tolist(),
        "slowest_error": round(float(errors[slowest]), 4),
        "mean_abs_error": round(float(np.abs(errors).mean()), 4),
        "slowest_found": bool(measured[predicted.argmax()] >= 0.95 * measured.max()),
        "reference_s": round(profiled.reference_s, 5),
        "pairs": pairs, "pairs_in_order": agreeing,
        "wall_predicted_s": round(simulation.step_s + sync_s, 3), "wall_measured_s": round(wall, 3),
    }  # fmt: skip


def order(simulation: Simulation, records: list[Row]) -> tuple[int, int]:
    """(pairs in the same order, pairs) of starts of forwards on different ranks."""
    events = [
        (rank, float(simulation.forward[0][0, rank, slot]), begin)
        for rank, record in enumerate(records)
        for slot, (begin, _) in enumerate(record["forwards"])
    ]
    same = pairs = 0
    for one, other in itertools.combinations(events, 2):
        apart = one[1] - other[1]
        if one[0] != other[0] and abs(apart) > APART * simulation.step_s:
            pairs += 1
            same += (apart > 0) == (one[2] > other[2])
    return same, pairs


@dataclass(frozen=True)
class Profiled:
    """What a comparison rests on."""

    cost: CostModel
    sync_s: float
    fit_error: float
    overlap: float
    reference_s: float

    @classmethod
    def read(cls, path: Path, measured: Row) -> Profiled:
        """Of a profile file."""
        fit = measured["fit"]
        return cls(
            CostModel.load(str(path)), measured["step"]["gradient_sync_s"],
            fit["model_worst_error"], fit["ring_overlap"], measured["reference_s"],
        )  # fmt: skip

    def at_speed(self, reference_s: float) -> Profiled:
        """The same on a machine that takes so long for the reference work."""
        slower = reference_s / self.reference_s
        cost = replace(
            self.cost,
            **{name: slower * getattr(self.cost, name) for name in _SECONDS},
            inside_bytes_s=self.cost.inside_bytes_s / slower,
            across_bytes_s=self.cost.across_bytes_s / slower,
        )
        return replace(self, cost=cost, sync_s=slower * self.sync_s, reference_s=reference_s)


_SECONDS = ("attention_s", "linear_s", "fixed_s", "latency_s")


def check(ranks: int, folder: Path, corpus: Path) -> Row:
    """Profiles and trains every strategy, and compares."""
    path = folder / f"profile-{ranks}.json"
    runs: Row = {}
    for strategy in STRATEGIES:
        profiled = Profiled.read(path, profile(ranks, path))
        runs[strategy] = summary(train(ranks, strategy, corpus, path), profiled)
        brief = {key: value for key, value in runs[strategy].items() if key != "steps"}
        print(ranks, "ranks", strategy, brief, flush=True)
    return {"ranks": ranks, "runs": runs}


def summary(steps: list[Row], profiled: Profiled) -> Row:
    """Errors over the steps of a run."""
    speeds = [np.mean([r["reference_s"] for r in step["records"]]) for step in steps]
    rows = [
        compare(steps[i], profiled.at_speed(float(speeds[i - 1] + speeds[i]) / 2))
        for i in range(WARM_UP, len(steps))
    ]
    slowest = [row["slowest_error"] for row in rows]
    pairs = max(1, sum(row["pairs"] for row in rows))
    walls = [row["wall_predicted_s"] / row["wall_measured_s"] - 1 for row in rows]
    return {
        "slowest_error_mean": round(float(np.mean(slowest)), 4),
        "slowest_error_worst": max(slowest, key=abs),
        "rank_error_mean": round(float(np.mean([row["mean_abs_error"] for row in rows])), 4),
        "slowest_found": f"{sum(row['slowest_found'] for row in rows)} of {len(rows)} steps",
        "in_order": round(sum(row["pairs_in_order"] for row in rows) / pairs, 4),
        "wall_error_median": round(float(np.median(walls)), 4),
        "machine_slower": round(
            float(np.mean([row["reference_s"] for row in rows])) / profiled.reference_s, 3
        ),
        "profile_fit_error": profiled.fit_error,
        "steps": rows,
    }


def main() -> int:
    """Sizes asked for; the exit code is 1 when a mean error on the slowest rank is over 15 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    cpu.install()
    import megatron.core.models.gpt
    import megatron.training.argument_utils  # noqa: F401

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        found = [check(ranks, folder, folder / "corpus") for ranks in args.ranks]
    result = {
        "what": "real CPU runs through Megatron's training loop against the simulator",
        "command": "python scripts/benchmarks/simulator_check.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work",
        "model": " ".join(MODEL), "steps": STEPS - WARM_UP, "apart": APART, "checks": found,
    }  # fmt: skip
    if RESULT.exists():  # sizes that were not asked for stay as they were
        old = json.loads(RESULT.read_text())["checks"]
        found += [entry for entry in old if entry["ranks"] not in args.ranks]
        found.sort(key=lambda entry: entry["ranks"])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    errors = [run["slowest_error_mean"] for entry in found for run in entry["runs"].values()]
    print(f"slowest rank: mean errors {errors}, at most 15 % wanted")
    return 0 if max(map(abs, errors)) <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
