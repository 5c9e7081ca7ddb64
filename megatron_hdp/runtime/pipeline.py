# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which micro-batch each forward and each pipeline transfer of Megatron's schedules is of.

Megatron exchanges shapes before every transfer of variable length, which costs a round trip and a
device synchronisation each time; every stage of ours knows the plan, and so what comes next.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

Shape = list[int]


def slots_per_group(args: Namespace) -> int:
    """What the number of slots must be a multiple of; above 1 with interleaved stages only.

    Megatron's schedule takes groups of `--microbatch-group-size-per-virtual-pipeline-stage`
    micro-batches, by default PP, through one model chunk after the other.
    """
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is None:
        return 1
    return int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)


def virtual_stages(args: Namespace) -> tuple[int, str]:
    """Model chunks of a pipeline rank, and the flag with its value that makes them; 1: one chunk.

    From arguments that are only parsed: Megatron's validate_args sets
    virtual_pipeline_model_parallel_size by the same rule.
    """
    depth = getattr(args, "pipeline_model_parallel_size", 1)
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        stages: int = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        return stages // depth, f"--pipeline-model-parallel-layout {layout}"
    if count := getattr(args, "num_virtual_stages_per_pipeline_rank", None):
        return count, f"--num-virtual-stages-per-pipeline-rank {count}"
    if each := getattr(args, "num_layers_per_virtual_pipeline_stage", None):
        ends = (
            args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        )
        chunks = (args.num_layers + ends) // depth // each
        return chunks, f"--num-layers-per-virtual-pipeline-stage {each}"
    return 1, ""


@dataclass(frozen=True)
class StageOrder:
    """One stage's forwards and receives in a step, each a micro-batch's number."""

    forwards: tuple[int, ...]
    """Every forward: one a micro-batch, with interleaved stages one a micro-batch and chunk."""
    from_previous: tuple[int, ...]
    """Activations, as they arrive from the previous stage."""
    from_next: tuple[int, ...]
    """Gradients, as they arrive from the next stage."""

    @classmethod
    def one_forward_one_backward(cls, count: int) -> StageOrder:
        """Also the order without pipeline stages."""
        return cls(*[tuple(range(count))] * 3)

    @classmethod
    def interleaved(cls, count: int, chunks: int, group: int, stage: int, depth: int) -> StageOrder:
        """Of Megatron's `forward_backward_pipelining_with_interleaving`.

        Backwards follow the forwards' table with the chunks reversed. The last stage's outputs go
        round to the first one, except the last chunk's; gradients alike, the other way.
        """
        table = get_schedule_table(count, chunks, group)
        every = tuple(slot for slot, _ in table)
        round_the_ends = tuple(slot for slot, chunk in table if chunk < chunks - 1)
        return cls(
            forwards=every,
            from_previous=every if stage > 0 else round_the_ends,
            from_next=every if stage < depth - 1 else round_the_ends,
        )


class PlannedShapes(P2PCommunicator):
    """P2PCommunicator that knows what it receives. One object per call of the schedule.

    Args:
        rows: tokens of every micro-batch of this pipeline, divided by TP under sequence parallel.
        order: which of them each transfer is of.
    """

    def __init__(
        self,
        pp_group: torch.distributed.ProcessGroup,
        config: ModelParallelConfig,
        rows: Sequence[int],
        hidden_size: int,
        order: StageOrder,
    ) -> None:
        super().__init__(pp_group, config)
        shapes: list[Shape] = [[row, 1, hidden_size] for row in rows]
        self._from_previous = iter([shapes[slot] for slot in order.from_previous])
        self._from_next = iter([shapes[slot] for slot in order.from_next])

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """(shape from the previous stage, shape from the next one); [0, 0, 0] where none comes."""
        previous = next(self._from_previous) if recv_prev else [0, 0, 0]
        following = next(self._from_next) if recv_next else [0, 0, 0]
        return previous, following
