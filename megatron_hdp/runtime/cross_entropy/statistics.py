# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a vocabulary-parallel loss keeps of each row of logits, and the loss made from it.

Both modes (fused, chunked) compute these per vocabulary shard and reduce them over the
tensor-parallel group in one gather, in which every rank sums in the same order: all get the same
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_hdp.runtime.waiting import waiting

IGNORE_INDEX = -100


@dataclass(frozen=True)
class LossTerms:
    """What the loss is made of, beside the cross-entropy."""

    label_smoothing: float = 0.0
    """In [0, 1): this much of the target's probability goes evenly to all other entries, as in
    `megatron.core.tensor_parallel.vocab_parallel_cross_entropy`, but over the whole vocabulary
    (Megatron's counts a rank's own shard, so that its ranks disagree under tensor parallelism)."""
    z_loss: float = 0.0
    """Coefficient of logsumexp^2, added to each token's loss (PaLM, section 5)."""

    def smoothing(self, vocabulary: int) -> float:
        """Weight of the mean over all entries, the target included."""
        return self.label_smoothing * vocabulary / (vocabulary - 1) if vocabulary > 1 else 0.0


@dataclass(frozen=True)
class Shard:
    """The part of the vocabulary that this rank's logits cover; shards are of equal size."""

    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None: this rank has the whole vocabulary."""

    @classmethod
    def of(cls, size: int, group: dist.ProcessGroup | None) -> Shard:
        return cls(size) if group is None else cls(size, group.rank(), group)

    @property
    def first(self) -> int:
        """Number of the first entry here."""
        return self.size * self.rank

    @property
    def vocabulary(self) -> int:
        """Entries over all shards, Megatron's padding included."""
        return self.size * (1 if self.group is None else self.group.size())


@dataclass(frozen=True)
class RowStatistics:
    """Per row of logits; all [T], fp32 (fp64 for fp64 logits)."""

    maximum: torch.Tensor
    sum_exp: torch.Tensor
    """Sum of exp(logit - maximum); kept apart from the maximum, so that large logits cost no
    precision."""
    target: torch.Tensor
    """The target's logit; 0 where another shard has it."""
    total: torch.Tensor
    """Sum of the logits, for label smoothing; 0 without."""

    @classmethod
    def empty(cls, rows: int, like: torch.Tensor) -> RowStatistics:
        """Room for `rows` rows of logits of `like`'s dtype, in one buffer."""
        dtype = accumulation_dtype(like.dtype)
        return cls(*torch.zeros(4, rows, dtype=dtype, device=like.device))

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """All four, in order."""
        return self.maximum, self.sum_exp, self.target, self.total

    def reduced(self, shard: Shard) -> RowStatistics:
        """Over the whole vocabulary; collective over the shard's group."""
        if shard.group is None or shard.group.size() == 1:
            return self
        own = torch.stack(self.fields)
        ranks, rows = shard.group.size(), len(self.maximum)
        every = own.new_empty(ranks * 4, rows)
        with waiting("the tensor-parallel ranks' sums of the loss"):
            dist.all_gather_into_tensor(every, own, group=shard.group)
        maxima, sums, targets, totals = every.view(ranks, 4, rows).unbind(1)
        maximum = maxima.amax(0)
        # A shard whose entries are all -inf has sum 0; exp(-inf - maximum) is 0 too.
        return RowStatistics(
            maximum, (sums * (maxima - maximum).exp()).sum(0), targets.sum(0), totals.sum(0)
        )

    def losses(self, targets: torch.Tensor, vocabulary: int, terms: LossTerms) -> torch.Tensor:
        """[T] loss of each row; 0 where the target is IGNORE_INDEX."""
        log_sum = self.sum_exp.log()
        loss = log_sum + (self.maximum - self.target)
        smoothing = terms.smoothing(vocabulary)
        if smoothing:
            mean_log_probability = (self.total / vocabulary - self.maximum) - log_sum
            loss = (1 - smoothing) * loss - smoothing * mean_log_probability
        if terms.z_loss:
            loss = loss + terms.z_loss * (self.maximum + log_sum) ** 2
        return loss.masked_fill(targets == IGNORE_INDEX, 0)


class BackwardRows(NamedTuple):
    """Per row of logits, what their gradient needs; all [T]."""

    targets: torch.Tensor
    """int64."""
    maximum: torch.Tensor
    """Over the whole vocabulary, like sum_exp."""
    sum_exp: torch.Tensor
    loss_gradients: torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16, fp16 and fp32; fp64 for fp64, which only tests use."""
    return torch.promote_types(dtype, torch.float32)
