# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A step's numbers for TensorBoard and W&B, through the writers that Megatron made."""

from __future__ import annotations

from megatron_hdp.planning.values import Plan
from megatron_hdp.runtime.records import StepRecord, summarise

MIB = 1 << 20
GIB = 1 << 30


def step_metrics(plan: Plan, record: StepRecord) -> dict[str, float]:
    """`hdp/name(unit)` -> value, of the last pipeline stage's last rank where they are per rank."""
    summary = summarise(plan)
    return {
        "hdp/balance(slowest rank over mean)": summary.balance,
        "hdp/travelled tokens(%)": 100 * summary.travelled_token_share,
        "hdp/rings(count)": float(plan.num_rings),
        "hdp/largest ring(ranks)": float(summary.ring_sizes[-1][0]),
        "hdp/fewest micro-batches(count)": float(summary.micro_batches_min),
        "hdp/most micro-batches(count)": float(summary.micro_batches_max),
        "hdp/sent in rings(MiB)": record.ring_bytes / MIB,
        "hdp/offloaded(GiB)": record.offloaded_bytes / GIB,
        "hdp/over the host limit(GiB)": record.refused_bytes / GIB,
        "hdp/exposed planning(ms)": 1000 * record.exposed_planning_s,
        "hdp/exposed loading(ms)": 1000 * record.exposed_loading_s,
        "hdp/loaded(tokens)": float(record.loaded_tokens),
        "hdp/loaded(MiB)": record.loaded_bytes / MIB,
        "hdp/loading behind training(ms)": 1000 * record.loaded_s,
        "hdp/loader retries(count)": float(record.load_retries),
        "hdp/predicted schedule(ms)": 1000 * plan.predicted_step_s,
        "hdp/schedule(ms)": 1000 * record.duration_s,
    }


def write_metrics(metrics: dict[str, float], iteration: int) -> None:
    """Writes where Megatron writes: its writers exist on the last rank, if they were asked for."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None:
        for name, value in metrics.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb is not None:
        wandb.log(metrics, iteration)
