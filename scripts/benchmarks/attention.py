# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a ring's compute costs beside one kernel call, on one CPU core.

Fraction of ideal = one causal kernel call on the same tokens / the ring's compute summed over its
members, forward and backward, in CPU time of the process. Published for ring-flash-attn (its
README, 8 GPUs, forward and backward, fraction of a FlashAttention call): 75.9 % packed, 90.2 %
unpacked; transfers are in those figures and not in these.

A quarter of an hour on one core; shared cores add to the spread, hence medians of interleaved
rounds (`megatron_hdp.testing.timing`).

    python scripts/benchmarks/attention.py                      # writes results/attention-cpu.json
    python scripts/benchmarks/attention.py --lengths 4096 8192  # these rows of it only
    python scripts/benchmarks/attention.py --lengths 32768 --packed
    python scripts/benchmarks/attention.py --quick              # small sizes, prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.testing.timing import Row, measure_rings, packed_lengths

RESULT = Path(__file__).parent / "results" / "attention-cpu.json"
PUBLISHED = {
    "ring-flash-attn zigzag varlen, packed": 0.759,
    "ring-flash-attn zigzag, unpacked": 0.902,
    "note": "quoted from its README: 8 GPUs, transfers included; not measured here",
}


class Cell(NamedTuple):
    """One length of `s` tokens on several rings."""

    s: int
    rings: tuple[int, ...]
    heads: tuple[int, int, int]
    repeats: int
    packed: tuple[bool, ...] = (False, True)


ALL = (1, 2, 4, 8, 16)
# Attention is quadratic: the longest lengths take one small head, and one round.
CELLS = (
    Cell(4096, ALL, (4, 1, 64), 10),
    Cell(8192, ALL, (4, 1, 64), 6),
    Cell(16384, ALL, (2, 1, 64), 4),
    Cell(32768, ALL, (1, 1, 64), 3, (False,)),
    # With one head the sequences' small calls are dominated by what a call costs by itself.
    Cell(32768, ALL, (4, 1, 64), 3, (True,)),
    Cell(65536, ALL[1:], (1, 1, 32), 2, (False,)),
    Cell(65536, ALL[3:], (2, 1, 32), 2, (True,)),
    Cell(131072, ALL[2:], (1, 1, 32), 1),
)
QUICK = (Cell(2048, (1, 2, 4), (2, 1, 64), 3),)


def measure(cells: tuple[Cell, ...]) -> list[Row]:
    """Rows of every cell, single and packed."""
    rows = []
    for cell in cells:
        for packed in cell.packed:
            lengths = packed_lengths(cell.s) if packed else (cell.s,)
            rows += measure_rings(
                lengths, cell.rings, CpuFlash(), heads=cell.heads, dtype=torch.float32,
                device=torch.device("cpu"), repeats=cell.repeats,
            )  # fmt: skip
    return rows


def show(rows: list[Row]) -> None:
    """The rows as a table."""
    table = Table("tokens", "ring", "shard", "sequences", "fraction of ideal", "quartiles")
    for row in rows:
        spread = "{:.3f} - {:.3f}".format(*row["fraction_spread"])
        table.add_row(
            *(str(row[name]) for name in ("s", "ring", "shard_tokens", "sequences")),
            f"{row['fraction_of_ideal']:.3f}", spread,
        )  # fmt: skip
    Console().print(table)


def write(rows: list[Row]) -> None:
    """Writes the rows, each with its date; rows of other lengths stay."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = {(row["s"], row["packed"]) for row in rows}
    kept = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [row for row in kept if (row["s"], row["packed"]) not in measured] + [
        row | {"date": date} for row in rows
    ]
    rows.sort(key=lambda row: (row["s"], row["packed"], row["ring"]))
    about = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "published_by_others": PUBLISHED,
    }
    RESULT.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; prints, writes nothing")
    choices = sorted({cell.s for cell in CELLS})
    parser.add_argument("--lengths", type=int, nargs="+", choices=choices, default=choices)
    parser.add_argument("--packed", action="store_true", help="packs only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = QUICK if args.quick else tuple(c for c in CELLS if c.s in args.lengths)
    if args.packed:
        cells = tuple(cell._replace(packed=(True,)) for cell in cells if True in cell.packed)
    rows = measure(cells)
    show(rows)
    if not args.quick:
        write(rows)


if __name__ == "__main__":
    main()
