# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""HDP's ring attention on one GPU over torch's own FlashAttention; nothing beyond torch is needed.

* Correctness: out, dq, dk, dv of rings of virtual ranks against fp64, next to the error that one
  kernel call has by itself.
* Fraction of ideal = one causal kernel call / the ring's compute summed over its members, forward
  and backward, for 8K to 256K tokens, single and packed, on rings of 1 to 16; and TFLOP/s.
* Overhead: HDP's path for a pack of local sequences over torch's `varlen_attn`, under autograd.

Query heads share key/value heads 8:1. At most five minutes: lengths that would take longer are
left out, and the result names them. Not yet run on a GPU.

    python scripts/benchmarks/gpu_attention.py               # writes results/gpu-attention-*.json
    python scripts/benchmarks/gpu_attention.py --device cpu  # a rehearsal: tiny sizes, prints only
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.runtime.attention import Kernel, select_kernel
from megatron_hdp.testing.attention import worst_ring_error
from megatron_hdp.testing.timing import Heads, Row, measure_local, measure_rings, packed_lengths
from megatron_hdp.testing.virtual_ranks import VirtualRank, virtual_ring

RESULTS = Path(__file__).parent / "results"
MOST_OF_ONE_CALL = 3.0
"""A ring's error may be this many times a single call's: each block's results are rounded."""


class Sizes(NamedTuple):
    """What is run where."""

    kernel: str
    dtype: torch.dtype
    heads: Heads
    rings: tuple[int, ...]
    checked: int
    """Tokens of the correctness cases; the reference holds all scores in fp64."""
    repeats: dict[int, int]
    """Length -> rounds."""
    local: tuple[tuple[int, ...], ...]
    """Packs of local sequences."""


K = 1024
SIZES = {
    "cuda": Sizes(
        "torch_flash", torch.bfloat16, (32, 4, 128), (1, 2, 4, 8, 16), 2 * K,
        {8 * K: 8, 16 * K: 6, 32 * K: 4, 64 * K: 3, 128 * K: 2, 256 * K: 1},
        ((8 * K,), (1 * K,) * 8, (256,) * 32, (16 * K, 4 * K, 2 * K, 1 * K, 512, 512, 8 * K)),
    ),
    "cpu": Sizes(
        "cpu_flash", torch.float32, (8, 1, 16), (1, 2, 4, 8, 16), 96, {256: 2, 512: 1},
        ((64,), (40, 30, 20)),
    ),
}  # fmt: skip


def check(sizes: Sizes, kernel: Kernel, device: torch.device) -> list[Row]:
    """Rings of virtual ranks against fp64, single, packed and in a window."""
    rows = []
    for window in (None, sizes.checked // 8):
        for lengths in ((sizes.checked,), (sizes.checked // 2, sizes.checked // 3 + 1, 5, 1)):
            errors = {
                size: _ring_error(lengths, size, window, sizes, kernel, device)
                for size in sizes.rings
            }
            for size, error in errors.items():
                rows.append({
                    "lengths": lengths, "ring": size, "window": window, "error": error,
                    "one_call_error": errors[1],
                    "right": error <= MOST_OF_ONE_CALL * errors[1],
                })  # fmt: skip
    return rows


def _ring_error(
    lengths: tuple[int, ...],
    size: int,
    window: int | None,
    sizes: Sizes,
    kernel: Kernel,
    device: torch.device,
) -> float:
    """A ring's error with the same tensors for every size; of one rank: a single call's."""
    torch.manual_seed(0)
    sequences = tuple(Sequence(i, length) for i, length in enumerate(lengths))
    query_heads, groups, dim = sizes.heads

    def make(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, dim, device=device).to(sizes.dtype)

    whole = {
        s.id: (make(s.length, query_heads), make(s.length, groups), make(s.length, groups))
        for s in sequences
    }
    grad_out = {s.id: make(s.length, query_heads) for s in sequences}
    ring = Ring(tuple(range(size))) if size > 1 else None
    batch = MicroBatch(0, ring, sequences if ring else (), () if ring else sequences)
    results = virtual_ring([batch] * size, whole, grad_out, kernel, window=window)
    return float(f"{worst_ring_error(results, whole, grad_out, window=window):.3g}")


def rings(
    sizes: Sizes, kernel: Kernel, device: torch.device, left: Callable[[], float]
) -> Iterator[Row]:
    """Rows of every length that fits in the time and the memory; else a row that says so."""
    options: Any = {"heads": sizes.heads, "dtype": sizes.dtype, "device": device}
    per_round = {False: 0.0, True: 0.0}
    for s, repeats in sizes.repeats.items():
        for packed in (False, True):
            # One round warms up; four times the pairs of the length before.
            expected = 4 * per_round[packed] * (repeats + 1)
            row: Row = {"s": s, "packed": packed}
            if expected > left():
                yield row | {"left_out": f"about {expected:.0f} s, past the time"}
                continue
            begun = time.monotonic()
            try:
                yield from measure_rings(
                    packed_lengths(s) if packed else (s,), sizes.rings, kernel,
                    repeats=repeats, **options,
                )  # fmt: skip
            except torch.OutOfMemoryError:
                yield row | {"left_out": "out of memory"}
            per_round[packed] = (time.monotonic() - begun) / (repeats + 1)


def plain_call(rank: VirtualRank) -> torch.Tensor:
    """What one would write without HDP: torch's varlen call, on a CPU a call per sequence."""
    q, k, v = rank.inputs
    own = rank.state.own
    if not q.is_cuda:
        attention = torch.nn.functional.scaled_dot_product_attention
        cuts = own.cu_q.diff().tolist()
        parts = (x.transpose(0, 1).split(cuts, 1) for x in (q, k, v))
        outs = [
            attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1)
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 needs no word of it
        more["enable_gqa"] = True
    out: Any = varlen_attn(
        q, k, v, own.cu_q, own.cu_k, own.max_q, own.max_k, window_size=(-1, 0), **more
    )
    return out  # type: ignore[no-any-return]


def run(device: torch.device, budget_s: float) -> Row:
    """The result as it is written; prints each row when it is there."""
    begun = time.monotonic()
    sizes = SIZES[device.type]
    kernel = select_kernel(
        sizes.kernel, device=device, dtype=sizes.dtype, head_dim=sizes.heads[2], windowed=True
    )
    result: Row = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "kernel": kernel.name, "version": type(kernel).version(),  # type: ignore[attr-defined]
        "heads": sizes.heads, "dtype": str(sizes.dtype).removeprefix("torch."),
        "correctness": check(sizes, kernel, device), "local": [], "rings": [],
    }  # fmt: skip
    for row in result["correctness"]:
        print(json.dumps(row), flush=True)
    for lengths in sizes.local:
        result["local"].append(
            measure_local(lengths, kernel, plain_call, heads=sizes.heads, dtype=sizes.dtype,
                          device=device, repeats=10)
        )  # fmt: skip
        print(json.dumps(result["local"][-1]), flush=True)
    for row in rings(sizes, kernel, device, lambda: begun + budget_s - time.monotonic()):
        result["rings"].append(row)
        print(json.dumps(row), flush=True)
    result["seconds"] = round(time.monotonic() - begun, 1)
    return result


def main() -> int:
    """Runs, prints, and on a GPU writes the result; 1 if a ring is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--seconds", type=float, default=280.0, help="for all of it")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: pass --device cpu for a rehearsal.")
    torch.set_num_threads(1)
    result = run(torch.device(args.device), args.seconds)
    if args.device == "cuda":
        card = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
        path = RESULTS / f"gpu-attention-{card}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    wrong = [row for row in result["correctness"] if not row["right"]]
    if wrong:
        print(f"gpu_attention: {len(wrong)} rings are wrong, the first {wrong[0]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
