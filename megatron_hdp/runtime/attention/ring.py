# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ring attention of one micro-batch: ring shards and local sequences together.

Step 0 is one causal varlen call over everything this rank holds. In steps 1 .. P-1 the other
members' K/V arrive, while the previous ones are computed on; only the ring prefix takes part.
Forward and backward of the ring stand side by side below.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.runtime.attention.kernels import Kernel
from megatron_hdp.runtime.attention.query_rows import BackwardRows, ForwardRows
from megatron_hdp.runtime.attention.transfers import RingTransfers
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
) -> torch.Tensor:
    """Causal attention of every sequence of a micro-batch, over its ring; differentiable.

    Args:
        q: [T, H, D]; k, v: [T, G, D], rows in the layout's token order.
        state: the micro-batch; kept by the autograd context, so that backward and recompute use it
            whichever micro-batch is current then.
        layer_number: only labels transfers.

    Returns:
        [T, H, D] in q's dtype.
    """
    out: torch.Tensor = _RingAttention.apply(q, k, v, state, kernel, softmax_scale, layer_number)
    return out


class _RingAttention(torch.autograd.Function):
    """Saves q, k, v, out and LSE, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: MicroBatchState,
        kernel: Kernel,
        scale: float,
        layer: int,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = ring_forward(q, k, v, state, kernel, scale, layer)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.passed = (state, kernel, scale, layer)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_out = grad_outputs[0].contiguous()
        gradients = ring_backward(grad_out, *ctx.saved_tensors, *ctx.passed)
        return *gradients, None, None, None, None


def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: MicroBatchState,
    kernel: Kernel,
    scale: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass, without autograd.

    Args:
        q: [T, H, D]; k, v: [T, G, D], contiguous.

    Returns:
        out [T, H, D] in q's dtype, and LSE [H, T] in float32 (float64 for float64).
    """
    transfers = RingTransfers(state, layer, "forward", k, v) if state.steps else None
    out, lse = kernel.forward(q, k, v, state.own, True, scale)
    if transfers is None:
        return out, lse
    n = transfers.rows
    rows = ForwardRows(q[:n], out[:n], lse[:, :n])
    for hop, call in enumerate(state.steps, start=1):
        keys, values = transfers.kv(hop)
        if call is not None:
            keys, values = keys[call.k_rows], values[call.k_rows]
            query = rows.take(call.q_rows)
            rows.merge(*kernel.forward(query, keys, values, call.arguments, False, scale))
    rows.finish()
    return out, lse


def ring_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: MicroBatchState,
    kernel: Kernel,
    scale: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass, without autograd, from what `ring_forward` returned.

    Returns:
        dq, dk, dv in the inputs' dtype; sums over blocks are kept, and dK/dV travel, in LSE's.
    """
    transfers = RingTransfers(state, layer, "backward", k, v) if state.steps else None
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, state.own, True, scale)
    if transfers is None:
        return dq, dk, dv
    n = transfers.rows
    rows = BackwardRows((grad_out[:n], q[:n], out[:n]), lse[:, :n], dq[:n])
    for hop, call in enumerate(state.steps, start=1):
        keys, values = transfers.kv(hop)
        parts: list[torch.Tensor] = []
        if call is not None:
            row_grad_out, query, row_out, row_lse = rows.take(call.q_rows)
            dq_block, *parts = kernel.backward(
                row_grad_out, query, keys[call.k_rows], values[call.k_rows], row_out, row_lse,
                call.arguments, False, scale,
            )  # fmt: skip
            rows.add(dq_block)
        # Only now: the sum travels while the block is computed.
        dkv = transfers.dkv(hop, lse.dtype)
        if call is not None:
            for total, part in zip(dkv, parts, strict=True):
                _add_rows(total, part, call.k_rows)
        transfers.pass_dkv(hop)
    rows.finish()
    own = transfers.dkv(transfers.size, lse.dtype)
    dk[:n] += own[0]
    dv[:n] += own[1]
    return dq, dk, dv


def _add_rows(total: torch.Tensor, part: torch.Tensor, rows: slice | torch.Tensor) -> None:
    """Adds `part` to those rows of `total`, in total's dtype."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
