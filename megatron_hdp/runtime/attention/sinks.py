# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention sinks: one more logit per head in every row's softmax, with a value of zero.

What it changes is known only when all of a row's keys are: the merged LSE takes the sink in, and
the output shrinks by what the sink has drawn. Backward of the blocks is right with these two as it
is. Source: SoftmaxOne of megatron.core.fusions.fused_softmax (--softmax-type).
"""

from __future__ import annotations

import torch


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Takes the sink into a finished softmax, in place.

    Args:
        out: [T, H, D]; lse: [H, T], float32 or float64.
        sink: [H] logits, not scaled.
    """
    logits = sink.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - logits).T[..., None]
    out.copy_(out * kept)
    torch.logaddexp(lse, logits, out=lse)


def sink_gradient(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Gradient [H] of the sink, summed over the rows here, from the out and LSE that hold it."""
    drawn = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
    return -(drawn * delta).sum(1).to(sink.dtype)
