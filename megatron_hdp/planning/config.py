# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a planner is asked for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.head_parallel import HeadShape
from megatron_hdp.planning.values import IntArray, PlanError
from megatron_hdp.planning.windows import NO_WINDOWS, Windows


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
    expert_ranks: int = 1
    """Neighbouring ranks that share experts: they meet in every layer and need equal slots."""
    exchange_bytes: float = 0.0
    """Bytes per token and layer that the experts' exchange sends (`CostModel.with_experts`)."""
    slot_group: int = 1
    """Above 1 all ranks have equally many slots, a multiple of this (interleaved pipeline)."""
    cost_model: str | CostModel = "h100-estimate"
    """A preset's name, a profile file's path, or the model itself."""
    tensor_parallel: int = 1
    layers_per_stage: int = 0
    """Layers of a pipeline stage, for the memory rule; 0: the cost model's, split evenly."""
    activation_bytes: float = 0.0
    """Saved per token and layer over all TP ranks (`activations.saved_bytes`); 0: the cost
    model's."""
    loss_share: float = 0.0
    """Bytes of a token's loss over those that a stage's layers save of it; offload moves none of
    the former (`loss_memory`)."""
    recomputed_share: float = 0.0
    """Bytes that full recompute brings back of a token at a time, over the same; they do not move
    either (`activations.recomputed_bytes`)."""
    offload: bool = False
    """Whether activations may go to the host (ByteScale, section 5.2)."""
    offload_ratio: float | None = None
    """A ratio that every micro-batch gets, whatever the strategy decided; None: as decided."""
    host_memory: float = 200e9
    """Host bytes per rank for offloaded activations."""
    offload_limit_s: float = math.inf
    """With Eq. 3, offload narrows no ring so far that its sequence takes longer than this."""
    ring_room: int = 0
    """Tokens that a ring's member may hold, since offload brings them to the capacity; 0: that."""
    windows: Windows = NO_WINDOWS
    """Sliding windows of the layers; without any, the cost model's own."""
    slower_across: float = 1.0
    """Links across nodes are slower than the cost model says by this factor."""
    heads: HeadShape | None = None
    """Heads that rings may split where it pays (`head_parallel`); None: they stay whole. Transfers
    then weigh what these heads do, not the cost model's."""

    def __post_init__(self) -> None:
        for name in (
            "num_ranks",
            "capacity",
            "context_parallel_size",
            "pipeline_depth",
            "slot_group",
        ):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.num_ranks % self.context_parallel_size:
            raise PlanError(
                f"context_parallel_size {self.context_parallel_size} does not divide the domain of "
                f"{self.num_ranks} ranks"
            )
        if self.expert_ranks < 1 or self.num_ranks % self.expert_ranks:
            raise PlanError(
                f"{self.expert_ranks} ranks that share experts (--expert-parallel) do not divide "
                f"the domain of {self.num_ranks} ranks"
            )

    @property
    def room(self) -> int:
        """Tokens that a ring's member may hold."""
        return self.ring_room or self.capacity

    def cost(self) -> CostModel:
        """The cost model, read once per process."""
        model = _load(self.cost_model, self.tensor_parallel, self.slower_across, self.windows)
        if self.heads is not None:
            # A preset is of another model, and what pays depends on the heads alone.
            hop, moved = self.heads.hop_bytes, self.heads.moved_bytes
            ranks = self.tensor_parallel
            model = replace(
                model, ring_bytes=hop * ranks, head_bytes=moved * ranks,
                head_passes=self.heads.passes,
            )  # fmt: skip
        if self.expert_ranks == 1:
            return model
        return model.with_experts(self.expert_ranks, self.exchange_bytes)


@functools.cache
def _load(
    given: str | CostModel, tensor_parallel: int, slower_across: float, windows: Windows
) -> CostModel:
    model = CostModel.load(given) if isinstance(given, str) else given
    loaded = replace(model, tensor_parallel=tensor_parallel).with_links(slower_across)
    return loaded.with_windows(windows) if windows.share else loaded


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
