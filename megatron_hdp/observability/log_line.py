# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The `hdp:` line that follows Megatron's log line, and its numbers for the writers."""

from __future__ import annotations

from megatron_hdp.planning.values import Plan
from megatron_hdp.runtime.records import StepRecord, summarise
from megatron_hdp.runtime.session import Session


def log_step(session: Session, iteration: int, first: bool) -> None:
    """Prints the line on the last rank, where and when Megatron prints its own.

    Args:
        first: the first iteration after a start, which Megatron logs besides its interval.
    """
    from megatron.training import get_args
    from megatron.training.utils import print_rank_last

    plan, record = session.last_plan, session.last_record
    if plan is None or record is None:
        return
    if not first and iteration % get_args().log_interval:
        return
    print_rank_last(format_line(plan, record))


def format_line(plan: Plan, record: StepRecord) -> str:
    """`hdp: rings 1x44 2x6 8x1 | balance 1.03 | travelled 41.2% | micro-batches 3-5 | ...`"""
    summary = summarise(plan)
    rings = " ".join(f"{size}x{count}" for size, count in summary.ring_sizes)
    return (
        f"hdp: rings {rings}"
        f" | balance {summary.balance:.3f}"
        f" | travelled {100 * summary.travelled_token_share:.1f}%"
        f" | micro-batches {summary.micro_batches_min}-{summary.micro_batches_max}"
        f" | exposed planning {1000 * record.waited_s:.1f} ms"
        f" | {plan.strategy}"
    )
