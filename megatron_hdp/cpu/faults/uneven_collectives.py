# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""MoE's dispatcher gathers and scatters unequal parts over TP, which gloo cannot: padded here."""

from __future__ import annotations

import functools
from typing import Any

from megatron_hdp.cpu.faults.fault import Fault


def _padded(part: Any, rows: int) -> Any:
    """`part` [n, ...] with zero rows behind it, [rows, ...]."""
    import torch

    missing = part.new_zeros((rows - part.shape[0], *part.shape[1:]))
    return torch.cat((part, missing)) if len(missing) else part


def _handle() -> None:
    import torch
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_along_first_dim(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        parts = gather(_padded(input_, max(sizes)), group).chunk(len(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter)
    def reduce_scatter_along_first_dim(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        parts = [_padded(part, max(sizes)) for part in input_.split(sizes)]
        return scatter(torch.cat(parts), group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


FAULT = Fault(
    symbol="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
    seen="ProcessGroupGloo::allgather: invalid tensor size, with experts cut by TP",
    where="CPU mode",
    needed=lambda: True,
    handle=_handle,
    cpu_mode_only=True,
)
