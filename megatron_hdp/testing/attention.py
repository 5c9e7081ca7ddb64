# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A reference for packed causal attention, and how far a ring's result is from it.

Anyone can check a kernel on one device with it: see `virtual_ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.testing.virtual_ranks import Tensors


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One whole sequence by plain products, differentiable: q [s, H, D], k and v [s, G, D]."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def worst_ring_error(
    results: Sequence[tuple[MicroBatchLayout, list[torch.Tensor]]],
    whole: dict[int, Tensors],
    grad_out: dict[int, torch.Tensor],
) -> float:
    """Largest error of any rank's out, dq, dk, dv over that tensor's largest value, in fp64."""
    wanted: dict[int, list[torch.Tensor]] = {}
    for sequence, tensors in whole.items():
        inputs = [x.detach().double().requires_grad_() for x in tensors]
        out = causal_attention(*inputs)
        gradients = torch.autograd.grad(out, inputs, grad_out[sequence].double())
        wanted[sequence] = [out.detach(), *gradients]
    scales = [max(float(w[i].abs().max()) for w in wanted.values()) for i in range(4)]
    worst = 0.0
    for layout, got in results:
        for i, tensor in enumerate(got):
            at = 0
            for sequence, start, stop in layout.pieces:
                piece = tensor[at : at + stop - start].double()
                error = float((piece - wanted[sequence][i][start:stop]).abs().max())
                worst = max(worst, error / scales[i])
                at += stop - start
    return worst
