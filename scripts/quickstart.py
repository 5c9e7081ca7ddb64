# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on this environment's own source code, static and with HDP, and compares.

Writes out/quickstart: the corpus, both runs' step records and logs, summary.json, timeline.png.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "quickstart"
sys.path.insert(0, str(ROOT))

RANKS, STEPS, WARM_UP = 4, 8, 2
END_S = 120
CONTEXT, STATIC_CP, PACKS = 8192, 4, 6
TOLERANCE = 1e-4
"""Largest relative difference of a step's loss, fp32."""

MODEL = f"""
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 512 --seq-length {CONTEXT}
    --max-position-embeddings {CONTEXT} --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
"""
TRAINING = f"""
    --micro-batch-size 1 --global-batch-size {PACKS} --train-iters {STEPS} --lr 3e-3
    --lr-decay-style constant --eval-iters 1 --eval-interval 1000 --log-interval 1 --split 98,1,1
    --use-distributed-optimizer --context-parallel-size {STATIC_CP} --num-workers 0
"""


def build_corpus() -> list[str]:
    """Sources of the standard library and packages; returns the arguments that train on them."""
    prefix = OUT / "code"
    command = [
        sys.executable, "-W", "ignore", str(ROOT / "tools" / "build_corpus.py"),
        "--input", sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"],
        "--pattern", "*.py", "--sample", "1000", "--bpe-vocab-size", "4096",
        "--max-length", str(CONTEXT), "--too-long", "drop", "--output-prefix", str(prefix),
        "--picture", str(OUT / "lengths.png"),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ["--data-path", str(prefix), "--tokenizer-type", "NullTokenizer", "--vocab-size", "4096"]


def train(name: str, data: list[str], options: list[str]) -> dict[int, list[dict[str, Any]]]:
    """One run on RANKS forked processes; returns its step records."""
    from megatron_hdp.observability.timeline import load_records

    folder, log = OUT / name, OUT / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable, "-W", "ignore", "-m", "megatron_hdp.cpu.launch", "--nproc", str(RANKS),
        str(ROOT / "scripts" / "pretrain_gpt.py"), *MODEL.split(), *TRAINING.split(),
        *data, "--hdp", "--hdp-cpu", "--hdp-trace", str(folder), *options,
    ]  # fmt: skip
    console = Console()
    console.print(f"training {name} on {RANKS} ranks (log: {log.relative_to(ROOT)})")
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            stream.write(line)
            if "] iteration " in line or line.startswith("hdp:"):
                console.print(line.strip(), soft_wrap=True, highlight=False, markup=False)
        try:
            failed = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            failed = True
            stream.write(f"the launcher had written all and did not end in {END_S} s: killed\n")
        if failed:
            raise SystemExit(f"training {name} failed: see {log}")
    return load_records(str(folder))


def summarise(steps: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Losses of every step; times and bytes as means over the steps after the warm-up."""
    measured = [records for step, records in sorted(steps.items()) if step >= WARM_UP]
    slots = [slot for records in measured for record in records for slot in record["slots"]]
    local = sum(slot["local_tokens"] for slot in slots)
    total = local + sum(slot["ring_tokens"] for slot in slots)

    def mean(of: Any) -> float:
        return float(np.mean([of(records) for records in measured]))

    return {
        "losses": [
            sum(r["loss_sum"] for r in records) / sum(r["loss_tokens"] for r in records)
            for _, records in sorted(steps.items())
        ],
        "step_seconds": mean(lambda rs: max(r["end_s"] - r["begin_s"] for r in rs)),
        "slowest_busy_seconds": mean(lambda rs: max(r["busy_s"] for r in rs)),
        "mean_busy_seconds": mean(lambda rs: np.mean([r["busy_s"] for r in rs])),
        "ring_bytes": mean(lambda rs: sum(r["ring_bytes"] for r in rs)),
        "local_token_share": local / total,
        "sequences": [records[0]["sequences"] for _, records in sorted(steps.items())],
    }


def draw_typical_step(
    static: dict[int, list[dict[str, Any]]], hdp: dict[int, list[dict[str, Any]]]
) -> None:
    """The step whose two times have the median ratio, of those after the warm-up."""
    from megatron_hdp.observability.picture import draw
    from megatron_hdp.observability.timeline import of_records

    pairs = [
        (of_records(f"static DP x CP mesh, step {step}", static[step]),
         of_records(f"HDP, step {step}", hdp[step]))
        for step in static if step >= WARM_UP
    ]  # fmt: skip
    pairs.sort(key=lambda pair: pair[0].step_s / pair[1].step_s)
    draw(
        pairs[(len(pairs) - 1) // 2], str(OUT / "timeline.png"),
        heading=f"{PACKS} packs of {CONTEXT:,} tokens on {RANKS} ranks of this machine's CPU",
        note="the step of median ratio; a ring's members wait for each other inside their bars",
    )  # fmt: skip


def show(summary: dict[str, dict[str, Any]]) -> None:
    """The comparison as a table."""
    table = Table(title=f"mean of {STEPS - WARM_UP} steps, {RANKS} ranks on this machine's CPU")
    for heading in ("", "static", "HDP", "static / HDP"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (
        ("step time (s)", "step_seconds", 1.0, "{:.2f}"),
        ("busy, slowest rank (CPU s)", "slowest_busy_seconds", 1.0, "{:.2f}"),
        ("busy, mean rank (CPU s)", "mean_busy_seconds", 1.0, "{:.2f}"),
        ("over rings (MiB)", "ring_bytes", 2.0**20, "{:.1f}"),
        ("local tokens (%)", "local_token_share", 0.01, "{:.1f}"),
    )
    for title, key, unit, form in rows:
        static, hdp = (summary[name][key] / unit for name in ("static", "hdp"))
        ratio = f"{static / hdp:.2f}" if hdp and key != "local_token_share" else ""
        table.add_row(title, form.format(static), form.format(hdp), ratio)
    Console().print(table)


def main() -> int:
    """Builds, trains twice, compares; the exit code is 1 when the losses differ."""
    OUT.mkdir(parents=True, exist_ok=True)
    data = build_corpus()
    static = train("static", data, ["--hdp-strategy", "static"])
    hdp = train("hdp", data, [])
    summary = {"static": summarise(static), "hdp": summarise(hdp)}
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_typical_step(static, hdp)
    show(summary)
    losses = [np.array(summary[name]["losses"]) for name in ("static", "hdp")]
    worst = float(np.abs(losses[0] / losses[1] - 1).max())
    print(f"losses of {STEPS} steps: largest relative difference {worst:.1e} (at most {TOLERANCE})")
    print(f"wrote {(OUT / 'summary.json').relative_to(ROOT)} and timeline.png beside it")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
