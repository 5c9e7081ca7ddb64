# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that the loss takes on a rank of the last pipeline stage, by mode."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("megatron", "fused", "chunked")


@dataclass(frozen=True)
class LossMemory:
    """The output projection's logits and what is made of them, at their peak.

    * megatron: logits, and their softmax in fp32, kept for backward. In fp32 training they share
      one buffer, which cross_entropy.py overwrites.
    * fused: the logits, which the gradient overwrites.
    * chunked: one chunk's logits and their fp32 copy; the weight's gradient in fp32, unless it is
      summed in Megatron's main_grad.
    """

    vocabulary: int
    """Entries, Megatron's padding included."""
    hidden_size: int
    tensor_parallel: int = 1
    element_bytes: int = 2
    """Of the parameters' dtype."""
    chunk: int = 1024
    sums_in_main_grad: bool = True
    """Megatron's gradient_accumulation_fusion."""

    @property
    def _shard(self) -> float:
        return self.vocabulary / self.tensor_parallel

    @property
    def _copy_bytes(self) -> int:
        """Of an fp32 copy of a logit; fp32 logits are not copied."""
        return 4 if self.element_bytes < 4 else 0

    def bytes_per_token(self, mode: str) -> float:
        """What each token of a micro-batch adds."""
        kept = {
            "megatron": self.element_bytes + self._copy_bytes,
            "fused": self.element_bytes,
            "chunked": 0,
        }
        return kept[mode] * self._shard

    def _chunked(self, tokens: int) -> float:
        chunk = min(self.chunk, tokens) * self._shard * (self.element_bytes + self._copy_bytes)
        sum_bytes = 0 if self.sums_in_main_grad else 4 * self._shard * self.hidden_size
        return chunk + sum_bytes

    def peak(self, mode: str, tokens: int) -> float:
        """Bytes at `tokens` tokens in the micro-batch."""
        beside = self._chunked(tokens) if mode == "chunked" else 0.0
        return beside + tokens * self.bytes_per_token(mode)
