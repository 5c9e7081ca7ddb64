# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Merges the per-rank records of `--hdp-trace` into one trace or picture of who did what when.

    python tools/trace.py --run "HDP=out/hdp" --output trace.json
    python tools/trace.py --run "static=out/a" --run "HDP=out/b" --step 3 --output picture.html

FILE.json opens in ui.perfetto.dev: all steps, or one; the form that `simulate --trace` writes too.
FILE.html and FILE.png show one step, a panel per run on one time axis.
"""

from __future__ import annotations

import argparse
import sys

from megatron_hdp.observability.perfetto import write_chrome, write_runs
from megatron_hdp.observability.picture import draw
from megatron_hdp.observability.timeline import Record, Timeline, load_records, of_records

Runs = list[tuple[str, dict[int, list[Record]]]]


def main(argv: list[str] | None = None) -> int:
    """Reads the runs' records and writes the picture or the trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="TITLE=FOLDER; repeatable")
    parser.add_argument(
        "--step", type=int, help="one step; default: all, or the last for a picture"
    )
    parser.add_argument("--output", required=True, help="FILE.json for Perfetto, FILE.html or .png")
    args = parser.parse_args(argv)
    if not args.output.endswith((".json", ".html", ".png")):
        raise SystemExit(f"--output {args.output}: the name must end in .json, .html or .png")
    runs = [_load(given) for given in args.run]
    if args.output.endswith(".json") and args.step is None:
        write_runs(runs, args.output)
    elif args.output.endswith(".json"):
        write_chrome(_one_step(runs, args.step), args.output)
    else:
        draw(
            _one_step(runs, args.step), args.output, heading="What every rank did, as recorded",
            note="a ring's members wait for each other inside their bars",
        )  # fmt: skip
    return 0


def _load(given: str) -> tuple[str, dict[int, list[Record]]]:
    title, equals, folder = given.partition("=")
    if not equals:
        raise SystemExit(f"--run {given}: give TITLE=FOLDER, for example HDP={given}")
    return title, load_records(folder)


def _one_step(runs: Runs, wanted: int | None) -> list[Timeline]:
    common = set.intersection(*(set(steps) for _, steps in runs))
    step = max(common, default=None) if wanted is None else wanted
    if step is None or step not in common:
        raise SystemExit(f"--step {step}: the runs have the steps {sorted(common)} in common.")
    timelines = []
    for title, steps in runs:
        sent = sum(record["ring_bytes"] for record in steps[step]) / 2**20
        heading = f"{title}, step {step}, {sent:.1f} MiB over rings"
        timelines.append(of_records(heading, steps[step]))
    return timelines


if __name__ == "__main__":
    sys.exit(main())
