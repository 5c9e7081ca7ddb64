# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Draws who did what when in one training step, one panel per run, on one time axis.

    tools/trace_picture.py --run "static=out/a" --run "HDP=out/b" --step 3 --output picture.png

A run's folder holds the records that `--hdp-trace` writes. An output that ends in .json is a trace
for ui.perfetto.dev, of the form that `simulate --trace` writes too.
"""

from __future__ import annotations

import argparse
import sys

from megatron_hdp.observability.timeline import draw, load_records, of_records, write_chrome


def main(argv: list[str] | None = None) -> int:
    """Reads the runs' records and writes the picture or the trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="TITLE=FOLDER; repeatable")
    parser.add_argument("--step", type=int, help="which step; default the last one in all runs")
    parser.add_argument("--output", required=True, help="FILE.png, or FILE.json for Perfetto")
    args = parser.parse_args(argv)
    runs = []
    for given in args.run:
        title, _, folder = given.partition("=")
        runs.append((title, load_records(folder)))
    common = set.intersection(*(set(steps) for _, steps in runs))
    step = max(common) if args.step is None else args.step
    if step not in common:
        raise SystemExit(f"--step {step}: the runs have the steps {sorted(common)} in common.")
    timelines = []
    for title, steps in runs:
        sent = sum(record["ring_bytes"] for record in steps[step]) / 2**20
        heading = f"{title}, step {step}, {sent:.1f} MiB over rings"
        timelines.append(of_records(heading, steps[step]))
    if args.output.endswith(".json"):
        write_chrome(timelines, args.output)
    else:
        draw(timelines, args.output, "(rings wait for their slowest member)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
