# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention of one micro-batch, differentiable: by a ring, or by a ring that splits heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_hdp.runtime.attention.head_split import HeadsHere, heads_backward, heads_forward
from megatron_hdp.runtime.attention.kernels import Kernel
from megatron_hdp.runtime.attention.ring import ring_backward, ring_forward
from megatron_hdp.runtime.attention.sinks import add_sink, sink_gradient
from megatron_hdp.runtime.micro_batch import MicroBatchState


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: MicroBatchState,
    *,
    kernel: Kernel,
    softmax_scale: float,
    layer_number: int,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every sequence of a micro-batch, over its ring; differentiable.

    Args:
        q: [T, H, D]; k, v: [T, G, D], rows in the layout's token order.
        state: the micro-batch; kept by the autograd context, so that backward and recompute use it
            whichever micro-batch is current then.
        layer_number: only labels transfers.
        window: tokens that a token sees before itself; None: all.
        sink: [H] logits that take part in every row's softmax (see `sinks`); differentiable.

    Returns:
        [T, H, D] in q's dtype.

    Raises:
        RuntimeError: a window where the micro-batch splits heads.
    """
    what = AttentionPass(state, kernel, softmax_scale, layer_number, window)
    out: torch.Tensor = _RingAttention.apply(q, k, v, sink, what)
    return out


class AttentionPass(NamedTuple):
    """What a layer's forward and backward need beside tensors."""

    state: MicroBatchState
    kernel: Kernel
    scale: float
    layer: int
    window: int | None = None


Saved = tuple[torch.Tensor | None, ...]
"""What backward needs: of whole heads q, k, v, out, LSE and the sink."""


class _RingAttention(torch.autograd.Function):
    """Saves what `attention_forward` says, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        what: AttentionPass,
    ) -> torch.Tensor:
        out, saved = attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), sink, what)
        ctx.save_for_backward(*saved)
        ctx.what = what
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = attention_backward(
            grad_outputs[0].contiguous(), ctx.saved_tensors, ctx.what, ctx.needs_input_grad[3]
        )
        return *gradients, None


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    what: AttentionPass,
) -> tuple[torch.Tensor, Saved]:
    """The forward pass without autograd; arguments contiguous, else as in `ring_attention`.

    Returns:
        out [T, H, D] in q's dtype, and what `attention_backward` is to be handed.
    """
    state, kernel, scale, layer, window = what
    if state.head_split is not None:
        if window is not None:
            raise RuntimeError(f"heads are split in {state.layout.ring}, but layer {layer} has a "
                               f"window of {window}: pass --hdp-head-parallel off.")  # fmt: skip
        out, here = heads_forward(q, k, v, sink, state, state.head_split, kernel, scale, layer)
        return out, (*here, sink)
    out, lse = ring_forward(q, k, v, state, kernel, scale, layer, window)
    if sink is not None:
        add_sink(out, lse, sink)
    return out, (q, k, v, out, lse, sink)


def attention_backward(
    grad_out: torch.Tensor, saved: Saved, what: AttentionPass, with_sink: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv in the inputs' dtype, and the sink's gradient [H] of the rows here.

    Args:
        with_sink: whether a sink's gradient is wanted; a constant's is not, and is None.
    """
    state, kernel, scale, layer, window = what
    sink = saved[-1] if with_sink else None
    if state.head_split is not None:
        return heads_backward(
            grad_out, HeadsHere(*saved[:-1]), sink, state, state.head_split, kernel, scale, layer
        )
    q, k, v, out, lse = (x for x in saved[:-1] if x is not None)
    dq, dk, dv = ring_backward(grad_out, q, k, v, out, lse, state, kernel, scale, layer, window)
    dsink = None if sink is None else sink_gradient(grad_out, out, lse, sink)
    return dq, dk, dv, dsink
