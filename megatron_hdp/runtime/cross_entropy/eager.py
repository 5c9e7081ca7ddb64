# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels compute, in plain torch: for one chunk of logits, on any device.

Both functions use the logits' buffer up where their dtype is the accumulation dtype.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.cross_entropy.statistics import (
    IGNORE_INDEX,
    BackwardRows,
    LossTerms,
    RowStatistics,
    Shard,
    accumulation_dtype,
)


def row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard, terms: LossTerms
) -> RowStatistics:
    """Of this shard's logits [T, V / TP]; targets int64 [T], numbered over the whole vocabulary."""
    values = logits.to(accumulation_dtype(logits.dtype))
    column, own = _own_column(targets, shard)
    target = values.gather(1, column).squeeze(1).masked_fill(~own, 0)
    total = values.sum(-1) if terms.label_smoothing else torch.zeros_like(target)
    maximum = values.amax(-1)
    # While all are -inf, -inf - -inf would be NaN.
    shift = maximum.masked_fill(maximum == float("-inf"), 0)
    sum_exp = values.sub_(shift[:, None]).exp_().sum(-1)
    return RowStatistics(maximum, sum_exp, target, total)


def write_gradient(
    logits: torch.Tensor, rows: BackwardRows, shard: Shard, terms: LossTerms
) -> None:
    """Replaces logits [T, V / TP] by their gradient."""
    targets, maximum, sum_exp, loss_gradients = rows
    gradient = logits.to(accumulation_dtype(logits.dtype))
    smoothing = terms.smoothing(shard.vocabulary)
    scale = sum_exp.reciprocal()
    if terms.z_loss:
        scale = scale * (1 + 2 * terms.z_loss * (maximum + sum_exp.log()))
    gradient.sub_(maximum[:, None]).exp_().mul_(scale[:, None])
    column, own = _own_column(targets, shard)
    gradient.scatter_add_(1, column, (own.to(gradient.dtype) * (smoothing - 1))[:, None])
    if smoothing:
        gradient.sub_(smoothing / shard.vocabulary)
    gradient.mul_(loss_gradients[:, None])
    # Rows without a loss are zeroed, not multiplied by zero: their logits may be anything.
    without = (loss_gradients == 0) | (targets == IGNORE_INDEX)
    logits.copy_(gradient.masked_fill_(without[:, None], 0))


def _own_column(targets: torch.Tensor, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [T, 1] the target's column here (0 where another shard has it), and bool [T]."""
    column = targets - shard.first
    own = (column >= 0) & (column < shard.size)
    return column.masked_fill(~own, 0)[:, None], own
