# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fused vocabulary-parallel cross-entropy: no copy of the logits, gradient in their own buffer.

ByteScale's FusedSoftmaxCrossEntropy (section 6). Forward reads the logits once, backward reads and
writes them once: 6 bytes of traffic per bf16 logit, and no memory beyond some numbers a row.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megatron_hdp.runtime.cross_entropy.statistics import (
    IGNORE_INDEX,
    BackwardRows,
    LossTerms,
    RowStatistics,
    Shard,
    accumulation_dtype,
)


def why_not_usable(device: torch.device) -> str | None:
    """What the fused loss lacks on a device, or None when it can run there."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return "triton's kernels need a GPU"
    return None


def fused_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    terms: LossTerms | None = None,
) -> torch.Tensor:
    """Loss of every token.

    Args:
        logits: [..., V / TP], bf16, fp16, fp32 or fp64, any strides. Backward leaves the gradient
            in their buffer: whoever else has saved them for its own backward gets autograd's
            "modified by an inplace operation".
        targets: int64 [...], numbered over the whole vocabulary; IGNORE_INDEX: no loss, no
            gradient.
        group: the tensor-parallel group; collective over it in forward.

    Returns:
        [...] fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: the logits are a leaf, whose values are the caller's.
    """
    base = logits if logits._base is None else logits._base
    if base.is_leaf and base.requires_grad:
        raise ValueError(
            "the fused cross-entropy writes gradients over the logits, and these are a leaf: "
            "pass logits.clone()."
        )
    rows = logits.reshape(-1, logits.shape[-1])
    losses: torch.Tensor = _FusedCrossEntropy.apply(
        rows, targets.reshape(-1), Shard.of(rows.shape[-1], group), terms or LossTerms()
    )
    return losses.view(targets.shape)


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: Shard, terms: LossTerms
    ) -> torch.Tensor:
        statistics = _row_statistics(logits, targets, shard, terms).reduced(shard)
        ctx.save_for_backward(logits, targets, statistics.maximum, statistics.sum_exp)
        ctx.shard, ctx.terms = shard, terms
        return statistics.losses(targets, shard.vocabulary, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, maximum, sum_exp = ctx.saved_tensors
        rows = BackwardRows(targets, maximum, sum_exp, loss_gradients.contiguous())
        _write_gradient(logits, rows, ctx.shard, ctx.terms)
        increment_version(logits)  # autograd does not see what a kernel writes
        return logits, None, None, None


def _row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard, terms: LossTerms
) -> RowStatistics:
    """Of this shard's logits [T, V / TP]; targets int64 [T]."""
    import triton

    from megatron_hdp.runtime.cross_entropy.triton_kernels import statistics_kernel

    rows, columns = logits.shape
    found = RowStatistics.empty(rows, logits)
    block = min(triton.next_power_of_2(columns), 16384)
    statistics_kernel[(rows,)](
        logits, targets, found.maximum, found.sum_exp, found.target, found.total,
        columns, logits.stride(0), logits.stride(1), shard.first,
        ACCUMULATE=_triton_dtype(logits.dtype), TOTAL=terms.label_smoothing > 0,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return found


def _write_gradient(
    logits: torch.Tensor, rows: BackwardRows, shard: Shard, terms: LossTerms
) -> None:
    """Replaces logits [T, V / TP] by their gradient."""
    import triton

    from megatron_hdp.runtime.cross_entropy.triton_kernels import gradient_kernel

    count, columns = logits.shape
    block = min(triton.next_power_of_2(columns), 4096)
    gradient_kernel[(count, triton.cdiv(columns, block))](
        logits, *rows,
        columns, logits.stride(0), logits.stride(1), shard.first,
        IGNORE_INDEX=IGNORE_INDEX, SMOOTHING=terms.smoothing(shard.vocabulary),
        VOCABULARY=shard.vocabulary, Z_LOSS=terms.z_loss,
        ACCUMULATE=_triton_dtype(logits.dtype), BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if accumulation_dtype(dtype) == torch.float64 else tl.float32


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
