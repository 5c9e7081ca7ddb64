# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a planner is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.planning.values import IntArray, PlanError


@dataclass(frozen=True)
class PlannerConfig:
    """Options of every strategy. The same on all ranks; its repr is part of the digest."""

    num_ranks: int
    """N, the HDP domain."""
    capacity: int
    """Tokens per rank in one micro-batch."""
    strategy: str = "auto"
    context_parallel_size: int = 1
    """Ranks per replica of the `static` mesh."""
    pipeline_depth: int = 1
    equal_slots: bool = False
    """All ranks get equally many micro-batches (expert parallelism)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "capacity", "context_parallel_size", "pipeline_depth"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.num_ranks % self.context_parallel_size:
            raise PlanError(
                f"context_parallel_size {self.context_parallel_size} does not divide the domain of "
                f"{self.num_ranks} ranks"
            )


@dataclass(frozen=True)
class StepRequest:
    """One step's sequences."""

    ids: IntArray
    """[S] unique ids."""
    lengths: IntArray
    """[S] tokens, each at least 1."""
    packs: IntArray | None = None
    """[P+1] offsets of Megatron's samples in ids and lengths; only `static` needs them."""
    step: int = 0
