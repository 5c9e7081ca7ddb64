# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What one rank did in one step: the numbers behind the log line, the trace and the pictures."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_hdp.planning.values import Plan


@dataclass
class StepRecord:
    """One rank's step. Times are seconds on the host's clock (`time.time`) or durations."""

    kind: str
    """train, valid or test."""
    step: int
    rank: int
    """HDP rank."""
    pipeline_stage: int
    strategy: str
    begin_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    """CPU time of the process during the schedule; on a GPU the host's part only."""
    exposed_planning_s: float = 0.0
    """Time that the step waited for its plan, which all ranks must have."""
    exposed_loading_s: float = 0.0
    """Time that it waited for this rank's tokens."""
    loaded_s: float = 0.0
    """From asking for this rank's tokens to having them, mostly behind training."""
    loaded_tokens: int = 0
    """Tokens that the loader brought to this rank."""
    loaded_bytes: int = 0
    """Of tokens, labels and masks, as they came."""
    load_retries: int = 0
    """Times that another server of the loader had to be asked."""
    ring_bytes: int = 0
    """K/V and dK/dV bytes that this rank sent."""
    offloaded_bytes: int = 0
    """Activation bytes that went to this rank's host memory."""
    refused_bytes: int = 0
    """Activation bytes that should have gone there, but the limit was reached."""
    forwards: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of every forward step, in order."""
    forward_slots: list[int] = field(default_factory=list)
    """Slot of each; with interleaved pipeline stages a slot comes once per model chunk."""
    slots: list[dict[str, object]] = field(default_factory=list)
    """Per micro-batch: ring ranks, tokens on the ring, local tokens."""
    sequences: str = ""
    """Hash of the step's sequence ids and lengths, the same on every rank and for every plan."""
    loss_sum: float = 0.0
    """Sum of this rank's token losses; only on the last pipeline stage, only with a trace."""
    loss_tokens: float = 0.0
    """Tokens that the sum is over."""

    @property
    def duration_s(self) -> float:
        """The schedule, from its first forward to its last backward on this rank."""
        return self.end_s - self.begin_s

    def write(self, folder: str, global_rank: int) -> None:
        """Appends itself as one JSON line to `folder`/rank<global rank>.jsonl."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"rank{global_rank:05d}.jsonl"), "a") as stream:
            stream.write(json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class PlanSummary:
    """The parts of a plan that a line of log can hold."""

    ring_sizes: tuple[tuple[int, int], ...]
    """(ring size, number of rings), size 1 counting the local sequences' ranks' micro-batches."""
    balance: float
    """Slowest rank over the mean, by predicted time where the plan has one, else by tokens."""
    travelled_token_share: float
    micro_batches_min: int
    micro_batches_max: int


def summarise(plan: Plan) -> PlanSummary:
    """Needs no communication: every rank holds the whole plan."""
    sizes = Counter(int(size) for size in plan.ring_sizes)
    local = int(plan.micro_batch_counts.sum()) - int(plan.ring_sizes.sum())
    if local:
        sizes[1] = local
    weights = plan.predicted_s if len(plan.predicted_s) else plan.micro_batch_tokens
    loads = np.add.reduceat(weights.astype(np.float64), plan.first_micro_batch[:-1])
    return PlanSummary(
        ring_sizes=tuple(sorted(sizes.items())),
        balance=float(loads.max() / loads.mean()) if loads.mean() > 0 else 1.0,
        travelled_token_share=plan.travelled_token_share,
        micro_batches_min=int(plan.micro_batch_counts.min()),
        micro_batches_max=int(plan.micro_batch_counts.max()),
    )
