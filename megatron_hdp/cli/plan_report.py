# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Plans some steps of a list of lengths and says what each plan would do."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning import Plan, PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.degrees import layers_per_rank, most_room
from megatron_hdp.planning.replay import Replay, replay


@dataclass(frozen=True)
class StepReport:
    """One planned step, with its replay."""

    plan: Plan
    replay: Replay
    predicted_s: float
    lower_bound_s: float
    planner_cpu_ms: float
    ring_bytes: float
    static_ring_bytes: float
    memory_peak_tokens: int
    offloaded_bytes: float
    dense_s: float | None = None
    """Predicted step of the same strategy where no rank shares experts; None: none does."""

    def as_dict(self) -> dict[str, Any]:
        """The keys of `plan --json`."""
        sizes = Counter(int(size) for size in self.plan.ring_sizes)
        return {
            "predicted_s": self.predicted_s,
            "lower_bound_s": self.lower_bound_s,
            "ratio": self.predicted_s / self.lower_bound_s,
            "planner_cpu_ms": self.planner_cpu_ms,
            "travelled_token_share": self.plan.travelled_token_share,
            "ring_bytes": self.ring_bytes,
            "static_ring_bytes": self.static_ring_bytes,
            "ring_sizes": {str(size): count for size, count in sorted(sizes.items())},
            "micro_batches_min": int(self.plan.micro_batch_counts.min()),
            "micro_batches_max": int(self.plan.micro_batch_counts.max()),
            "memory_peak_tokens": self.memory_peak_tokens,
            "offloaded_bytes": self.offloaded_bytes,
            **({"over_dense": self.predicted_s / self.dense_s} if self.dense_s else {}),
        }

    def as_row(self) -> list[str]:
        """The columns of the table."""
        values = self.as_dict()
        share = self.ring_bytes / self.static_ring_bytes if self.static_ring_bytes else 0.0
        rings = " ".join(f"{size}x{count}" for size, count in values["ring_sizes"].items())
        return [
            f"{self.predicted_s:.2f}",
            f"{values['ratio']:.3f}",
            rings if len(rings) < 40 else rings[:37] + "...",
            f"{100 * self.plan.travelled_token_share:.1f} %",
            f"{share:.2f}",
            f"{values['micro_batches_min']}-{values['micro_batches_max']}",
            f"{self.memory_peak_tokens:,}",
            f"{self.offloaded_bytes / 1e9:.1f}",
            f"{self.planner_cpu_ms:.0f}",
            *([f"{values['over_dense']:.3f}"] if self.dense_s else []),
        ]


def report_steps(
    config: PlannerConfig, lengths: NDArray[np.int64], args: argparse.Namespace
) -> list[StepReport]:
    """Plans `args.steps` steps of packs made from shuffled `lengths`.

    Raises:
        PlanError: a step cannot be planned, or there are too few sequences for one.
    """
    context = args.seq_length or int(lengths.max())
    packs = args.global_batch_size or max(
        1, -(-8 * config.num_ranks * config.capacity // context),
        config.num_ranks // config.context_parallel_size,
    )  # fmt: skip
    order = np.random.RandomState(args.seed).permutation(len(lengths))
    starts = _pack_starts(lengths[order], context)
    if len(starts) - 1 < packs:
        packs = len(starts) - 1
    reports = []
    for step in range(args.steps):
        first = step * packs % max(1, len(starts) - packs)
        offsets = starts[first : first + packs + 1]
        chosen = order[offsets[0] : offsets[-1]]
        request = StepRequest(chosen, lengths[chosen], offsets - offsets[0], step)
        reports.append(_report(config, request))
    return reports


def _pack_starts(lengths: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """Greedy packs of whole sequences (the rule of megatron_hdp.data.packing, without torch)."""
    from megatron_hdp.data.packing import pack_starts

    return pack_starts(lengths, context)


def _report(config: PlannerConfig, request: StepRequest) -> StepReport:
    cost, depth = config.cost(), config.pipeline_depth
    begun = time.process_time()
    plan = plan_step(config, request)
    planner_cpu_ms = 1000 * (time.process_time() - begun)
    replayed = replay(plan, cost, depth)
    lengths = np.asarray(request.lengths, np.int64)
    room = max(config.capacity, int(most_room(config)))  # with offload rings may be narrower
    try:
        bound = lower_bound(lengths, config.num_ranks, room, cost, depth)
    except (PlanError, ValueError):
        bound = replayed.step_s
    plan = replace(plan, predicted_step_s=replayed.step_s, lower_bound_s=bound)
    static_size = config.context_parallel_size
    static_tokens = float(cost.hop_tokens(lengths, static_size).sum())
    return StepReport(
        plan=plan,
        replay=replayed,
        predicted_s=replayed.step_s,
        lower_bound_s=bound,
        planner_cpu_ms=planner_cpu_ms,
        ring_bytes=_ring_bytes(plan, cost),
        static_ring_bytes=static_tokens * (static_size - 1) * _bytes_per_hop(cost),
        memory_peak_tokens=int(plan.resident_tokens(depth).max()),
        offloaded_bytes=_offloaded(plan, config, cost),
        dense_s=None if config.expert_ranks == 1 else _dense_s(config, request),
    )


def _dense_s(config: PlannerConfig, request: StepRequest) -> float:
    """What equal slots and waits in every layer cost shows beside this."""
    dense = replace(config, expert_ranks=1)
    return replay(plan_step(dense, request), dense.cost(), dense.pipeline_depth).step_s


def _bytes_per_hop(cost: CostModel) -> float:
    return cost.ring_bytes * cost.layers / cost.tensor_parallel


def _ring_bytes(plan: Plan, cost: CostModel) -> float:
    """Every shard makes P-1 hops: s (P-1) tokens per ring sequence, fewer in windowed layers."""
    ring = plan.ring_of >= 0
    size = plan.ring_sizes[plan.ring_of[ring]]
    carried = cost.hop_tokens(plan.lengths[ring], size) * (size - 1)
    return float(carried.sum()) * _bytes_per_hop(cost)


def _offloaded(plan: Plan, config: PlannerConfig, cost: CostModel) -> float:
    if not len(plan.offload_ratios):
        return 0.0
    layers = layers_per_rank(config) - 1
    per_token = cost.activation_bytes / cost.tensor_parallel * layers
    return float((plan.offload_ratios * plan.micro_batch_tokens).sum()) * per_token
