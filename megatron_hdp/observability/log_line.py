# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The `hdp:` line that follows Megatron's log line."""

from __future__ import annotations

from megatron_hdp.planning.values import Plan
from megatron_hdp.runtime.records import StepRecord, summarise


def format_line(plan: Plan, record: StepRecord) -> str:
    """`hdp: rings 1x44 2x6 8x1 | balance 1.03 | travelled 41.2% | micro-batches 3-5 | ...`"""
    summary = summarise(plan)
    rings = " ".join(f"{size}x{count}" for size, count in summary.ring_sizes)
    offloaded = ""
    if record.offloaded_bytes or record.refused_bytes:
        offloaded = f" | offloaded {record.offloaded_bytes / 2**30:.3f} GiB"
    if record.refused_bytes:
        offloaded += f", {record.refused_bytes / 2**30:.3f} GiB over --hdp-host-memory"
    loading = ""
    if record.load_retries:
        loading = f" | loader asked {record.load_retries} times more"
    return (
        f"hdp: rings {rings}"
        f" | balance {summary.balance:.3f}"
        f" | travelled {100 * summary.travelled_token_share:.1f}%"
        f" | micro-batches {summary.micro_batches_min}-{summary.micro_batches_max}"
        f" | exposed planning {1000 * record.exposed_planning_s:.1f} ms"
        f" | exposed loading {1000 * record.exposed_loading_s:.1f} ms"
        f" | read {record.loaded_tokens} tokens in {1000 * record.loaded_s:.1f} ms{loading}"
        f"{offloaded} | {plan.strategy}"
    )
