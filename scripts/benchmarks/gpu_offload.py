# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of activation offload on one GPU, as in ByteScale's Fig. 21.

A few LLaMA-7B-like layers in plain torch, one sequence of 16K to 256K tokens, forward and backward:
without offload, with ratios 0.5, 0.8 and 1, and with full recompute instead. Past the crossover
length compute hides the copies; it is reported as measured, and as the copy bandwidth predicts it.
Not yet run on a GPU.

    python scripts/benchmarks/gpu_offload.py               # 5 minutes; writes results/
    python scripts/benchmarks/gpu_offload.py --device cpu  # a rehearsal of tiny sizes; prints only
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.checkpoint import checkpoint

from megatron_hdp.runtime.offload import ActivationOffload

RESULT = Path(__file__).parent / "results" / "gpu_offload.json"
RATIOS = (0.5, 0.8, 1.0)
PLAIN, RECOMPUTE = "no offload", "full recompute"
VARIANTS = (PLAIN, *(f"r={ratio:g}" for ratio in RATIOS), RECOMPUTE)
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What is run where."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    layers: int
    lengths: tuple[int, ...]
    copy_bytes: int
    dtype: torch.dtype


SIZES = {
    "cuda": Size(4096, 11008, 32, 8, 4, tuple(2**k for k in range(14, 19)), 1 << 30,
                 torch.bfloat16),
    "cpu": Size(64, 176, 4, 2, 4, (64, 128), 1 << 20, torch.float32),
}  # fmt: skip


class Layer(torch.nn.Module):
    """RMSNorm, grouped causal attention and SwiGLU; x is [s, h]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.width = size, size.hidden // size.heads
        self.norm1, self.norm2 = torch.nn.RMSNorm(size.hidden), torch.nn.RMSNorm(size.hidden)
        rows = (size.heads + 2 * size.groups) * self.width
        self.qkv = torch.nn.Linear(size.hidden, rows, bias=False)
        self.proj = torch.nn.Linear(size.hidden, size.hidden, bias=False)
        self.fc1 = torch.nn.Linear(size.hidden, 2 * size.ffn, bias=False)
        self.fc2 = torch.nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, groups = self.size.heads, self.size.groups
        mixed = self.qkv(self.norm1(x)).view(len(x), heads + 2 * groups, self.width)
        q, k, v = (p.transpose(0, 1)[None] for p in mixed.split([heads, groups, groups], 1))
        attention = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        x = x + self.proj(attention[0].transpose(0, 1).reshape(len(x), -1))
        gate, up = self.fc1(self.norm2(x)).chunk(2, -1)
        return x + self.fc2(torch.nn.functional.silu(gate) * up)


class Bench:
    """One stack on one device."""

    def __init__(self, device: torch.device, host_bytes: int) -> None:
        self.device, self.size = device, SIZES[device.type]
        torch.manual_seed(0)
        made = [Layer(self.size).to(device, self.size.dtype) for _ in range(self.size.layers)]
        self.layers = torch.nn.ModuleList(made)
        self.engine = ActivationOffload(host_bytes, device=device)
        self.engine.watch(self.layers, self.layers)

    def run(self, length: int, variant: str, steps: int) -> Row:
        """Mean seconds, peak bytes and what moved; the first of several steps is not timed."""
        ratio = float(variant[2:]) if variant.startswith("r=") else None
        row: Row = {"length": length, "variant": variant}
        seconds = []
        refused = self.engine.totals.refused_bytes
        try:
            for _ in range(steps):
                self._start_peak()
                begun = self._now()
                counts = self._step(length, ratio, variant == RECOMPUTE)
                seconds.append(self._now() - begun)
                row |= counts | {"peak_bytes": self._peak(counts)}
        except torch.OutOfMemoryError:
            return row | {"out_of_memory": True}
        finally:
            self._tidy()
        timed = seconds[1:] or seconds
        row["seconds"], row["spread"] = statistics.mean(timed), max(timed) - min(timed)
        row["refused_bytes"] = self.engine.totals.refused_bytes - refused
        return row

    def _step(self, length: int, ratio: float | None, recompute: bool) -> Row:
        x = torch.randn(length, self.size.hidden, device=self.device, dtype=self.size.dtype)
        x.requires_grad_()
        offload = None if ratio is None else self.engine.activations(ratio, keep=[x])
        y = x
        with offload or contextlib.nullcontext():
            for layer in self.layers:
                y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
        y.float().square().mean().backward()
        if offload is None:
            return {}
        return {
            "saved_bytes": sum(layer.saved_bytes for layer in offload.layers),
            "offloaded_bytes": sum(layer.offloaded_bytes for layer in offload.layers),
            "accounted_peak_bytes": offload.device_peak,
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _start_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self, counts: Row) -> int | None:
        """Allocated on the device; on a CPU what the engine accounts for, if it took part."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak: int | None = counts.get("accounted_peak_bytes")
        return peak

    def _tidy(self) -> None:
        self.layers.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bandwidth(self) -> Row:
        """Bytes per second out, in, and both at once (each way), through the engine's transport."""
        transport, n = self.engine.transport, self.size.copy_bytes
        host = [transport.host_slab(n) for _ in range(2)]
        device = [transport.device_buffer(n) for _ in range(2)]
        found: Row = {}
        for name, out, back in (("out", 1, 0), ("back", 0, 1), ("both", 1, 1)):
            seconds = []
            for _ in range(4):
                begun = self._now()
                if out:
                    transport.to_host([(device[0], host[0])], [transport.now()])
                if back:
                    transport.to_device([(host[1], device[1])], [transport.now()])
                seconds.append(self._now() - begun)
            found[f"{name}_bytes_s"] = n / min(seconds[1:])
        return found


def summarise(rows: list[Row], bandwidth: Row, layers: int) -> list[Row]:
    """Per length and ratio: overhead, memory saved over r (l-2) Act, and the hidden ratio."""
    plain = {row["length"]: row for row in rows if row["variant"] == PLAIN}
    found = []
    for row in rows:
        base = plain.get(row["length"], {})
        if not row["variant"].startswith("r=") or "seconds" not in row or "seconds" not in base:
            continue
        act = row["saved_bytes"] / layers
        forward = base["seconds"] / layers / 3.5  # backward of attention is 2.5 x its forward
        hidden = min(1.0, forward * bandwidth["both_bytes_s"] / act)
        summary = {
            "length": row["length"], "variant": row["variant"],
            "overhead": row["seconds"] / base["seconds"] - 1,
            "predicted_hidden_ratio": hidden,
        }  # fmt: skip
        if row["peak_bytes"] and base["peak_bytes"]:
            expected = float(row["variant"][2:]) * (layers - 2) * act
            summary["saved_over_expected"] = (base["peak_bytes"] - row["peak_bytes"]) / expected
        found.append(summary)
    return found


def crossover(summary: list[Row]) -> Row:
    """The shortest length at which everything offloads for at most 2 %, measured and predicted."""
    whole = [row for row in summary if row["variant"] == "r=1"]
    measured = [row["length"] for row in whole if row["overhead"] <= 0.02]
    predicted = [row["length"] for row in whole if row["predicted_hidden_ratio"] >= 1]
    return {"measured": min(measured, default=None), "predicted": min(predicted, default=None)}


def main() -> int:
    """Runs what fits in the time and prints it; writes the result of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--host-memory", type=float, default=96.0, help="GiB")
    parser.add_argument("--seconds", type=float, default=270.0, help="begin no cell after these")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_offload: no CUDA device is here: pass --device cpu to rehearse", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    begun, bench = time.perf_counter(), Bench(device, int(args.host_memory * 2**30))
    bandwidth = bench.bandwidth()
    rows, skipped = [], []
    for length in bench.size.lengths:
        for variant in VARIANTS:
            if time.perf_counter() - begun > args.seconds:
                skipped.append({"length": length, "variant": variant})
                continue
            # A step of the longest sequences takes most of a minute, and hides its own start.
            rows.append(bench.run(length, variant, 1 if length >= 2**18 else 3))
    summary = summarise(rows, bandwidth, bench.size.layers)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__, "layers": bench.size.layers, "hidden": bench.size.hidden,
        "bandwidth": bandwidth, "rows": rows, "summary": summary,
        "crossover": crossover(summary), "skipped": skipped,
    }  # fmt: skip
    _print(result)
    if device.type == "cuda":
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _print(result: Row) -> None:
    table = Table(title=f"{result['layers']} layers on {result['device']}")
    for heading in ("tokens", "variant", "s", "peak GiB", "offloaded GiB"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        seconds = "out of memory" if row.get("out_of_memory") else f"{row['seconds']:.4f}"
        sizes = [row.get(name) for name in ("peak_bytes", "offloaded_bytes")]
        cells = ["" if size is None else f"{size / 2**30:.3f}" for size in sizes]
        table.add_row(f"{row['length']}", row["variant"], seconds, *cells)
    Console().print(table)
    print(json.dumps({name: result[name] for name in ("bandwidth", "crossover", "skipped")}))


if __name__ == "__main__":
    sys.exit(main())
