# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A reference for packed causal attention, and how far a ring's result is from it.

Anyone can check a kernel on one device with it: see `virtual_ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.testing.virtual_ranks import Tensors


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """One whole sequence by plain products, differentiable: q [s, H, D], k and v [s, G, D].

    Args:
        window: tokens that a token sees before itself; None: all.
        sink: [H] logits of one more key, whose value is zero.
    """
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    if window is not None:
        seen = seen.triu(-window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def worst_ring_error(
    results: Sequence[tuple[MicroBatchLayout, list[torch.Tensor]]],
    whole: dict[int, Tensors],
    grad_out: dict[int, torch.Tensor],
    *,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> float:
    """Largest error of any rank's out, dq, dk, dv over that tensor's largest value, in fp64.

    With a sink, every rank's results end in its part of the sink's gradient.
    """
    wanted: dict[int, list[torch.Tensor]] = {}
    wanted_sink = torch.zeros(0 if sink is None else len(sink), dtype=torch.float64)
    for sequence, tensors in whole.items():
        inputs = [x.detach().double().requires_grad_() for x in tensors]
        if sink is not None:
            inputs.append(sink.detach().double().requires_grad_())
        out = causal_attention(
            inputs[0], inputs[1], inputs[2], window, inputs[3] if len(inputs) > 3 else None
        )
        gradients = torch.autograd.grad(out, inputs, grad_out[sequence].double())
        wanted[sequence] = [out.detach(), *gradients[:3]]
        if sink is not None:
            wanted_sink += gradients[3]
    worst = _worst_sequence_error(results, wanted)
    if sink is not None:
        got = torch.stack([tensors[4].double() for _, tensors in results]).sum(0)
        worst = max(worst, float((got - wanted_sink).abs().max() / wanted_sink.abs().max()))
    return worst


def _worst_sequence_error(
    results: Sequence[tuple[MicroBatchLayout, list[torch.Tensor]]],
    wanted: dict[int, list[torch.Tensor]],
) -> float:
    scales = [max(float(w[i].abs().max()) for w in wanted.values()) for i in range(4)]
    worst = 0.0
    for layout, got in results:
        for i, tensor in enumerate(got[:4]):
            at = 0
            for sequence, start, stop in layout.pieces:
                piece = tensor[at : at + stop - start].double()
                error = float((piece - wanted[sequence][i][start:stop]).abs().max())
                worst = max(worst, error / scales[i])
                at += stop - start
    return worst
