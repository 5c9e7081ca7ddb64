# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Pipeline transfers whose shapes come from the plan.

Megatron exchanges shapes before every transfer of variable length, which costs a round trip and a
device synchronisation each time; every stage of ours knows the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Shape = list[int]


class PlannedShapes(P2PCommunicator):
    """P2PCommunicator that knows what it receives. One object per call of the schedule.

    Under 1F1B the k-th tensor from the previous stage, and the k-th gradient from the next one,
    belong to micro-batch k.

    Args:
        rows: tokens of every micro-batch of this pipeline, divided by TP under sequence parallel.
    """

    def __init__(
        self,
        pp_group: torch.distributed.ProcessGroup,
        config: ModelParallelConfig,
        rows: Sequence[int],
        hidden_size: int,
    ) -> None:
        super().__init__(pp_group, config)
        self._shapes: list[Shape] = [[row, 1, hidden_size] for row in rows]
        self._from_previous = 0
        self._from_next = 0

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """(shape from the previous stage, shape from the next one); [0, 0, 0] where none comes."""
        previous: Shape = [0, 0, 0]
        following: Shape = [0, 0, 0]
        if recv_prev:
            previous = self._shapes[self._from_previous]
            self._from_previous += 1
        if recv_next:
            following = self._shapes[self._from_next]
            self._from_next += 1
        return previous, following
