# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Output projection and cross-entropy in token chunks: only one chunk's logits ever exist.

Backward computes each chunk's logits again. Gradients cannot be made in forward instead: what a
token's loss weighs (mask, loss scale) is known in backward only, and the weight's gradient sums
over tokens. That costs one product more, 8 instead of 6 T V H operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.autograd.function import once_differentiable

from megatron_hdp.runtime.cross_entropy.eager import row_statistics, write_gradient
from megatron_hdp.runtime.cross_entropy.statistics import (
    BackwardRows,
    LossTerms,
    RowStatistics,
    Shard,
    accumulation_dtype,
)
from megatron_hdp.runtime.waiting import waiting


@dataclass(frozen=True)
class Projection:
    """How hidden states become logits, beside the weight."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group that the vocabulary is cut over."""
    sequence_parallel: bool = False
    """Hidden states are cut over the group too, by tokens."""
    chunk: int = 1024
    """Tokens whose logits exist at a time, over the whole group."""
    accumulate_in_main_grad: bool = False
    """Megatron's gradient_accumulation_fusion: the weight's gradient goes to weight.main_grad."""

    @property
    def parts(self) -> int:
        """Ranks that hidden states are cut over."""
        return self.group.size() if self.sequence_parallel and self.group is not None else 1

    def chunks(self, rows: int) -> Iterator[slice]:
        """Slices of a rank's `rows` hidden states."""
        step = max(1, self.chunk // self.parts)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] of this rank -> [parts * n, H] of all."""
        if self.parts == 1:
            return hidden
        return gather_from_sequence_parallel_region(hidden, group=self.group)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    projection: Projection | None = None,
    terms: LossTerms | None = None,
) -> torch.Tensor:
    """Loss of every token, from hidden states.

    Args:
        hidden: [t, H]; t = T / TP under sequence parallelism, else T.
        weight: [V / TP, H], of the same dtype. Its gradient is accumulated in fp32 (fp64).
        targets: int64 [T], numbered over the whole vocabulary; IGNORE_INDEX: no loss, no gradient.

    Returns:
        [T] fp32 (fp64 for fp64).
    """
    losses: torch.Tensor = _LinearCrossEntropy.apply(
        hidden, weight, targets, projection or Projection(), terms or LossTerms()
    )
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        projection: Projection,
        terms: LossTerms,
    ) -> torch.Tensor:
        shard = Shard.of(len(weight), projection.group)
        statistics = RowStatistics.empty(len(targets), hidden)
        by_part = [_by_part(field, projection) for field in statistics.fields]
        targets_by_part = _by_part(targets, projection)
        for rows in projection.chunks(len(hidden)):
            logits = projection.gathered(hidden[rows]) @ weight.t()
            chunk = row_statistics(logits, targets_by_part[:, rows].flatten(), shard, terms)
            for whole, part in zip(by_part, chunk.fields, strict=True):
                whole[:, rows] = _by_part(part, projection)
        statistics = statistics.reduced(shard)
        ctx.save_for_backward(hidden, weight, targets, statistics.maximum, statistics.sum_exp)
        ctx.projection, ctx.shard, ctx.terms = projection, shard, terms
        # Not saved as a tensor: other backwards add to it in between. Looked up here and not in
        # backward, where DDP may have handed out another one (as Megatron's own linear does it).
        main_grad = getattr(weight, "main_grad", None)
        ctx.main_grad = main_grad if projection.accumulate_in_main_grad else None
        return statistics.losses(targets, shard.vocabulary, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, *rows_of = ctx.saved_tensors
        projection: Projection = ctx.projection
        by_part = [_by_part(field, projection) for field in (*rows_of, loss_gradients)]
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = (
            _WeightGradient(weight, ctx.main_grad) if ctx.needs_input_grad[1] else None
        )
        transfers = []
        for rows in projection.chunks(len(hidden)):
            gathered = projection.gathered(hidden[rows])
            logits = gathered @ weight.t()
            chunk = BackwardRows(*(field[:, rows].flatten() for field in by_part))
            write_gradient(logits, chunk, ctx.shard, ctx.terms)
            if hidden_gradient is not None:
                part = hidden_gradient[rows]
                transfers.append(_reduce_into(part, logits @ weight, projection))
            if weight_gradient is not None:
                weight_gradient.add(logits, gathered)
        for transfer in transfers:
            if transfer is not None:
                with waiting("the tensor-parallel ranks to sum the loss's hidden gradient"):
                    transfer.wait()
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.result(),
            None, None, None,
        )  # fmt: skip


def _by_part(field: torch.Tensor, projection: Projection) -> torch.Tensor:
    """[T] -> [parts, t]: a chunk takes the same rows of every part."""
    return field.reshape(projection.parts, -1)


def _reduce_into(
    out: torch.Tensor, gradient: torch.Tensor, projection: Projection
) -> dist.Work | None:
    """Sums a chunk's hidden gradient over the group into this rank's rows of it."""
    if projection.parts > 1:
        out.copy_(reduce_scatter_to_sequence_parallel_region(gradient, group=projection.group))
        return None
    out.copy_(gradient)
    if projection.group is None or projection.group.size() == 1:
        return None
    return dist.all_reduce(out, group=projection.group, async_op=True)


class _WeightGradient:
    """Sum over chunks in fp32 (fp64): in Megatron's main_grad, or in a buffer of its own."""

    def __init__(self, weight: torch.Tensor, main_grad: torch.Tensor | None) -> None:
        self._weight = weight
        self._main_grad = main_grad
        dtype = accumulation_dtype(weight.dtype)
        if main_grad is not None and main_grad.dtype == dtype:
            self._sum = main_grad
        else:
            self._sum = torch.zeros_like(weight, dtype=dtype)

    def add(self, logits_gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        """Adds [n, V / TP]^T [n, H]."""
        left, dtype = logits_gradient.t(), self._sum.dtype
        if left.is_cuda and left.dtype != dtype:
            torch.addmm(self._sum, left, hidden, out_dtype=dtype, out=self._sum)
        else:
            self._sum.addmm_(left.to(dtype), hidden.to(dtype))

    def result(self) -> torch.Tensor:
        """What autograd is told; with main_grad, as Megatron's own linear tells it."""
        if self._main_grad is None:
            return self._sum.to(self._weight.dtype)
        if self._sum is not self._main_grad:
            self._main_grad.add_(self._sum)
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        # DDP's hook drops this dummy, or adds it where a tied embedding adds to it (zeros then).
        zero = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if zero else torch.empty_like(self._weight)
