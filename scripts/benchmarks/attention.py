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
    python scripts/benchmarks/attention.py --single --rings 2 4 --lengths 65536
    python scripts/benchmarks/attention.py --rope               # only what RoPE takes beside it
    python scripts/benchmarks/attention.py --quick              # small sizes, prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.testing.timing import Row, measure_rings, one_call, packed_lengths, seconds
from megatron_hdp.testing.virtual_ranks import lone_member

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
    Cell(65536, ALL[1:], (2, 1, 32), 2, (True,)),
    Cell(131072, ALL[2:], (1, 1, 32), 1),
)
ROPE_TOKENS = (1024, 2048, 4096)
ROPE_HEADS = (8, 1, 64)
ROPE_ROUNDS = 15
CPU = torch.device("cpu")
QUICK = (Cell(2048, (1, 2, 4), (2, 1, 64), 3),)


def measure(cells: tuple[Cell, ...]) -> list[Row]:
    """Rows of every cell, single and packed."""
    rows = []
    for cell in cells:
        for packed in cell.packed:
            # no bar: its thread would take CPU time, which is what is measured
            print(f"{cell.s} tokens{', packed' * packed}", file=sys.stderr, flush=True)
            lengths = packed_lengths(cell.s) if packed else (cell.s,)
            rows += measure_rings(
                lengths, cell.rings, CpuFlash(), heads=cell.heads, dtype=torch.float32,
                device=CPU, repeats=cell.repeats,
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


def measure_rope() -> list[dict[str, Any]]:
    """What applying RoPE, not fused, takes beside one causal kernel call on the same tokens."""
    rows = []
    for tokens in ROPE_TOKENS:
        times = rope_and_attention(tokens)
        low, share, high = statistics.quantiles([a / b for a, b in times], method="inclusive")
        rows.append({
            "tokens": tokens, "heads": ROPE_HEADS[0], "groups": ROPE_HEADS[1],
            "head_dim": ROPE_HEADS[2], "share_of_attention": round(share, 4),
            "share_spread": [round(low, 4), round(high, 4)],
            "rope_s": round(statistics.median(a for a, _ in times), 6),
            "attention_s": round(statistics.median(b for _, b in times), 6),
            "rounds": ROPE_ROUNDS,
        })  # fmt: skip
    return rows


def rope_and_attention(tokens: int) -> list[tuple[float, float]]:
    """Seconds of both in every round, forward and backward.

    The angles are made before, as they are made once per micro-batch.
    """
    from megatron_hdp import cpu

    cpu.install()
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from megatron_hdp.runtime.model import OneRankGroup

    rank = lone_member((tokens,), 1, 0, heads=ROPE_HEADS, dtype=torch.float32, device=CPU)
    inputs = [x.clone().requires_grad_() for x in rank.inputs[:2]]
    grads = [torch.randn_like(x) for x in inputs]
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    angles = torch.rand(tokens, 1, 1, ROPE_HEADS[2])

    def rope() -> None:
        rotated = [
            _apply_rotary_pos_emb_thd(x, lengths, angles, cp_group=OneRankGroup()) for x in inputs
        ]
        torch.autograd.grad(rotated, inputs, grads)

    def attention() -> None:
        one_call(rank, CpuFlash())

    rope()
    attention()
    return [(seconds(rope, CPU), seconds(attention, CPU)) for _ in range(ROPE_ROUNDS)]


def write(rows: list[Row], rope: list[dict[str, Any]]) -> None:
    """Writes what was measured, each row with its date; other rows stay."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    names = ("s", "packed", "ring")
    all_rows = {tuple(row[name] for name in names): row for row in old["rows"]} | {
        tuple(row[name] for name in names): row | {"date": date} for row in rows
    }
    about = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "published_by_others": PUBLISHED,
        "rope": [row | {"date": date} for row in rope] or old.get("rope", []),
        "rows": [all_rows[key] for key in sorted(all_rows)],
    }
    RESULT.write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; prints, writes nothing")
    choices = sorted({cell.s for cell in CELLS})
    parser.add_argument("--lengths", type=int, nargs="+", choices=choices, default=choices)
    parser.add_argument("--rings", type=int, nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--rope", action="store_true", help="RoPE beside attention, nothing else")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--packed", action="store_true", help="packs only")
    which.add_argument("--single", action="store_true", help="single sequences only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rope:
        rope = measure_rope()
        for row in rope:
            Console().print(row)
        write([], rope)
        return
    rows = measure(QUICK if args.quick else tuple(selected(args)))
    show(rows)
    if not args.quick:
        write(rows, [])


def selected(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells that the command line asks for."""
    for cell in CELLS:
        packed = tuple(p for p in cell.packed if not (args.single if p else args.packed))
        rings = tuple(ring for ring in cell.rings if ring in args.rings)
        if cell.s in args.lengths and packed and rings:
            yield cell._replace(packed=packed, rings=rings)


if __name__ == "__main__":
    main()
