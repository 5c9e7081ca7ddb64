# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Draws who did what when in one training step, one panel per run, on one time axis.

    tools/trace_picture.py --run "static=out/a" --run "HDP=out/b" --step 3 --output picture.png

A run's folder holds the records that `--hdp-trace` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def load(folder: str, kind: str = "train") -> dict[int, list[Record]]:
    """Step -> that step's record of every rank, in rank order."""
    steps: dict[int, list[Record]] = {}
    files = sorted(Path(folder).glob("rank*.jsonl"))
    if not files:
        raise SystemExit(f"{folder} holds no rank*.jsonl: train with --hdp-trace {folder}.")
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == kind:
                steps.setdefault(record["step"], []).append(record)
    return steps


def segments(record: Record) -> list[tuple[float, float, str, int]]:
    """(begin, end, phase, ring size) of a rank's forwards, and of what follows each of them.

    Without pipeline stages a micro-batch's backward follows its forward at once.
    """
    found = []
    origin = record["begin_s"]
    starts = [begin for begin, _ in record["forwards"]] + [record["end_s"]]
    for i, (begin, end) in enumerate(record["forwards"]):
        ring = max(1, len(record["slots"][i]["ring"]))
        found.append((begin - origin, end - origin, "forward", ring))
        found.append((end - origin, starts[i + 1] - origin, "backward", ring))
    return found


def draw(runs: list[tuple[str, list[Record]]], output: str) -> None:
    """One panel per (title, records of one step)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.patches import Patch

    largest = max(
        ring for _, records in runs for record in records for *_, ring in segments(record)
    )
    colors = {ring: colormaps["viridis_r"](ring / (largest + 1)) for ring in range(1, largest + 1)}
    height = 0.9 + sum(0.45 * len(records) + 0.9 for _, records in runs)
    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(10, height), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (title, records) in zip(axes[:, 0], runs, strict=True):
        for row, record in enumerate(records):
            for begin, end, phase, ring in segments(record):
                axis.barh(
                    row, end - begin, left=begin, height=0.75, color=colors[ring],
                    edgecolor="white", linewidth=0.6, alpha=1.0 if phase == "forward" else 0.55,
                )  # fmt: skip
        step_s = max(record["end_s"] - record["begin_s"] for record in records)
        sent = sum(record["ring_bytes"] for record in records) / 2**20
        axis.set_title(f"{title}: {step_s:.2f} s, {sent:.1f} MiB over rings", loc="left")
        axis.set_yticks(range(len(records)), [f"rank {record['rank']}" for record in records])
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("seconds in the step (rings wait for their slowest member)")
    used = sorted({ring for _, rs in runs for r in rs for *_, ring in segments(r)})
    handles = [Patch(color=colors[1], label="local")] if 1 in used else []
    handles += [Patch(color=colors[ring], label=f"ring of {ring}") for ring in used if ring > 1]
    handles += [Patch(color="grey", label="forward"), Patch(color="grey", alpha=0.55,
                label="backward")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(output, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Reads the runs' records and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="TITLE=FOLDER; repeatable")
    parser.add_argument("--step", type=int, help="which step; default the last one in all runs")
    parser.add_argument("--output", required=True)
    args = parser.parse_args(argv)
    runs = []
    for given in args.run:
        title, _, folder = given.partition("=")
        runs.append((title, load(folder)))
    common = set.intersection(*(set(steps) for _, steps in runs))
    step = max(common) if args.step is None else args.step
    if step not in common:
        raise SystemExit(f"--step {step}: the runs have the steps {sorted(common)} in common.")
    draw([(f"{title}, step {step}", steps[step]) for title, steps in runs], args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
