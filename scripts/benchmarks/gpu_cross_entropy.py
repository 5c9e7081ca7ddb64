# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of the loss on one GPU, against Megatron's and torch.compile's.

Forward + backward from bf16 logits, rounds of all implementations in turn; then output projection
plus loss for the chunked one. Bandwidth is what the fused loss must move (logits read in forward,
read and written in backward: 6 bytes each in bf16) over its time, as a share of what a copy of the
same size reaches on the same card. At most three minutes on a card.

    python scripts/benchmarks/gpu_cross_entropy.py                 # writes results/
    python scripts/benchmarks/gpu_cross_entropy.py --device cpu    # rehearsal: tiny, prints only

Not yet run on a GPU. The rehearsal needs TRITON_INTERPRET=1 for the fused loss.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).parent / "results" / "cross-entropy-gpu.json"
TOKENS = (8192, 16384, 32768, 65536)
VOCABULARIES = (32_000, 65_536, 128_256, 151_936)
HIDDEN = 4096
MEMORY_SHARE = 0.9
BUDGET_S = 170.0
Row = dict[str, Any]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Meter:
    """Times and peaks on the device; on a CPU the wall clock, and no peaks."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def run(self, work: Callable[[], None]) -> tuple[float, int]:
        """(seconds, peak bytes above what stood before)."""
        if not self.cuda:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun, 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return events[0].elapsed_time(events[1]) / 1e3, peak


def losses(group: Any, device: torch.device) -> dict[str, Loss]:
    """Implementations by name: logits [T, 1, V], targets [T, 1] -> losses [T, 1]."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy, why_not_usable

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return flat.view_as(targets)

    found: dict[str, Loss] = {
        "megatron": lambda x, y: vocab_parallel_cross_entropy(x, y, tp_group=group),
        "megatron_fused": lambda x, y: fused_vocab_parallel_cross_entropy(x, y, group),
        "torch_compile": torch.compile(plain, dynamic=False),
    }
    if why_not_usable(device) is None:
        found["fused"] = fused_cross_entropy
    return found


def loss_cell(tokens: int, vocabulary: int, group: Any, meter: Meter, rounds: int) -> Row:
    """All implementations on the same logits, in turn."""
    device = "cuda" if meter.cuda else "cpu"
    logits = torch.randn(tokens, 1, vocabulary, device=device, dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (tokens, 1), device=device)
    weighs = torch.rand(tokens, 1, device=device)
    row: Row = {"tokens": tokens, "vocabulary": vocabulary}

    def once(loss: Loss) -> tuple[float, int]:
        leaf = logits.detach().requires_grad_()
        # Not a leaf, as a model's logits; and each run has its own, which it may overwrite.
        held = [leaf.clone()]

        def work() -> None:
            out = loss(held.pop(), targets)
            out.backward(weighs)

        return meter.run(work)

    implementations = losses(group, logits.device)
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in implementations}
    for name, loss in implementations.items():  # compiles, autotunes, warms
        _guarded(functools.partial(once, loss), row, name)
    for _ in range(rounds):
        for name, loss in implementations.items():
            result = _guarded(functools.partial(once, loss), row, name)
            if result is not None:
                runs[name].append(result)
    _report(row, runs)
    copied = _copy_bandwidth(logits, meter)
    if runs.get("fused"):
        moved = 6 * logits.numel() / statistics.median(t for t, _ in runs["fused"])
        row["fused_bandwidth_share_of_copy"] = round(moved / copied, 3)
        row["copy_gb_s"] = round(copied / 1e9, 1)
    return row


def projection_cell(tokens: int, vocabulary: int, group: Any, meter: Meter, rounds: int) -> Row:
    """Output projection and loss: chunked against Megatron's unfused loss after a product."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_hdp.runtime.cross_entropy.chunked import Projection, linear_cross_entropy

    device, size = ("cuda", HIDDEN) if meter.cuda else ("cpu", 32)
    make = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, size, **make).requires_grad_()  # type: ignore[call-overload]
    weight = (0.02 * torch.randn(vocabulary, size, **make)).requires_grad_()  # type: ignore[call-overload]
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "megatron": lambda: vocab_parallel_cross_entropy(
            (hidden @ weight.t())[:, None], targets[:, None], tp_group=group
        ),
        "chunked": lambda: linear_cross_entropy(
            hidden, weight, targets, Projection(chunk=1024 if meter.cuda else 16)
        ),
    }
    row: Row = {"tokens": tokens, "vocabulary": vocabulary, "hidden": size}
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}

    def once(side: Callable[[], torch.Tensor]) -> tuple[float, int]:
        hidden.grad = weight.grad = None
        return meter.run(lambda: side().sum().backward())

    for _ in range(rounds + 1):
        for name, side in sides.items():
            result = _guarded(functools.partial(once, side), row, name)
            if result is not None:
                runs[name].append(result)
    _report(row, {name: timed[1:] for name, timed in runs.items()})
    return row


def _guarded(
    work: Callable[[], tuple[float, int]], row: Row, name: str
) -> tuple[float, int] | None:
    """The measurement, or None and a note where it does not fit."""
    try:
        return work()
    except torch.OutOfMemoryError:
        row[f"{name}_note"] = "out of memory"
        return None


def _report(row: Row, runs: dict[str, list[tuple[float, int]]]) -> None:
    for name, timed in runs.items():
        if timed:
            times = [seconds * 1e3 for seconds, _ in timed]
            row[f"{name}_ms"] = round(statistics.median(times), 3)
            row[f"{name}_ms_spread"] = [round(min(times), 3), round(max(times), 3)]
            row[f"{name}_peak_mb"] = round(max(peak for _, peak in timed) / 1e6, 1)


def _copy_bandwidth(logits: torch.Tensor, meter: Meter) -> float:
    """Bytes per second, read and written, of a copy of the logits."""
    target = torch.empty_like(logits)

    def copy() -> None:
        target.copy_(logits)

    times = [meter.run(copy)[0] for _ in range(4)][1:]
    return 2 * logits.numel() * logits.element_size() / statistics.median(times)


def run(device: str) -> Row:
    """The result as it is written; stops early rather than take longer than the budget."""
    if device == "cpu":
        from megatron_hdp import cpu

        cpu.install()
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    group, meter = dist.group.WORLD, Meter(device)
    cells = [(t, v) for t in TOKENS for v in VOCABULARIES] if meter.cuda else [(8, 96), (5, 250)]
    rounds = 5 if meter.cuda else 1
    result: Row = {"device": torch.cuda.get_device_name() if meter.cuda else "cpu, a rehearsal",
                   "torch": torch.__version__, "date": datetime.date.today().isoformat(),
                   "rounds": rounds, "loss": [], "projection": [], "left_out": []}  # fmt: skip
    begun = time.monotonic()
    for kind, measure in (("loss", loss_cell), ("projection", projection_cell)):
        for tokens, vocabulary in cells if kind == "loss" else cells[:: max(1, len(cells) // 4)]:
            if time.monotonic() - begun > BUDGET_S:
                result["left_out"].append([kind, tokens, vocabulary])
                continue
            if meter.cuda and not _fits(tokens, vocabulary):
                result["left_out"].append([kind, tokens, vocabulary])
                continue
            result[kind].append(measure(tokens, vocabulary, group, meter, rounds))
            print(json.dumps(result[kind][-1]), flush=True)
    return result


def _fits(tokens: int, vocabulary: int) -> bool:
    """Whether the bf16 logits, a run's own and a copy's target fit beside each other."""
    total = torch.cuda.get_device_properties(0).total_memory
    return 6 * tokens * vocabulary < MEMORY_SHARE * total


def main() -> int:
    """Runs, prints, and on a GPU writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: pass --device cpu for a rehearsal.")
    result = run(args.device)
    if args.device == "cuda":
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
