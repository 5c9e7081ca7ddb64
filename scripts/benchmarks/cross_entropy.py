# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Peak memory and time of output projection plus loss: chunked against Megatron's own, on a CPU.

Forward and backward of a ColumnParallelLinear and its loss, in fp32 and bf16, each measurement in a
process of its own (the peak of a process never falls), the sides alternating.

    python scripts/benchmarks/cross_entropy.py            # writes results/cross-entropy-cpu.json
    python scripts/benchmarks/cross_entropy.py --quick    # one small cell, prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

RESULT = Path(__file__).parent / "results" / "cross-entropy-cpu.json"
HIDDEN, CHUNK, ROUNDS = 256, 512, 3
MODES = ("megatron", "chunked")
Row = dict[str, Any]


def measure(mode: str, tokens: int, vocabulary: int, dtype_name: str) -> tuple[float, float]:
    """(seconds, bytes at the peak above what stood before), in this process."""
    from megatron_hdp import cpu

    cpu.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hdp.runtime.cross_entropy.chunked import Projection, linear_cross_entropy

    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    dtype = getattr(torch, dtype_name)
    layer = tensor_parallel.ColumnParallelLinear(
        HIDDEN, vocabulary, bias=False, init_method=torch.nn.init.normal_,
        config=TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, params_dtype=dtype,
            use_cpu_initialization=True, perform_initialization=False,
        ),
    )  # fmt: skip
    torch.nn.init.normal_(layer.weight, std=0.02)
    hidden = torch.randn(tokens, 1, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens, 1))
    before = _peak_bytes()
    begun = time.perf_counter()
    if mode == "megatron":
        logits, _ = layer(hidden)
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits, targets)
        del logits  # the model does not hold them either
    else:
        losses = linear_cross_entropy(
            hidden.view(tokens, HIDDEN), layer.weight, targets.view(-1), Projection(chunk=CHUNK)
        )
    losses.sum().backward()
    return time.perf_counter() - begun, _peak_bytes() - before


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cell(tokens: int, vocabulary: int, dtype: str, rounds: int) -> Row:
    """Both sides, alternating."""
    from megatron_hdp.planning.loss_memory import LossMemory

    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    context = multiprocessing.get_context("spawn")
    for _ in range(rounds):
        for mode in MODES:
            with context.Pool(1) as pool:
                found[mode].append(pool.apply(measure, (mode, tokens, vocabulary, dtype)))
    model = LossMemory(
        vocabulary, HIDDEN, element_bytes=4 if dtype == "float32" else 2, chunk=CHUNK,
        sums_in_main_grad=False,
    )  # fmt: skip
    ratios = [
        chunked[0] / megatron[0]
        for megatron, chunked in zip(found["megatron"], found["chunked"], strict=True)
    ]
    row: Row = {"tokens": tokens, "vocabulary": vocabulary, "hidden": HIDDEN, "dtype": dtype,
                "chunk": CHUNK}  # fmt: skip
    for mode in MODES:
        row[f"{mode}_s"] = round(statistics.median(seconds for seconds, _ in found[mode]), 3)
        row[f"{mode}_peak_mb"] = round(statistics.median(b for _, b in found[mode]) / 1e6, 1)
        row[f"{mode}_model_mb"] = round(model.peak(mode, tokens) / 1e6, 1)
    row["time_ratio"] = round(statistics.median(ratios), 2)
    row["time_ratio_spread"] = [round(min(ratios), 2), round(max(ratios), 2)]
    row["peak_ratio"] = round(row["chunked_peak_mb"] / row["megatron_peak_mb"], 3)
    return row


def run(quick: bool) -> Row:
    """The result as it is written."""
    import torch

    if quick:
        rows = [cell(1024, 4096, "float32", 1)]
    else:
        cells = [
            (tokens, vocabulary, dtype, ROUNDS)
            for dtype in ("float32", "bfloat16")
            for tokens, vocabulary in ((2048, 32_000), (8192, 32_000), (2048, 151_936))
        ]
        progress = track(cells, "measuring", console=Console(stderr=True))
        rows = [cell(*sizes) for sizes in progress]
    return {
        "what": "forward + backward of output projection and loss, one process, one thread",
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rounds": 1 if quick else ROUNDS,
        "rows": rows,
    }


def main() -> int:
    """Runs, prints, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    result = run(args.quick)
    for row in result["rows"]:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if not args.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
