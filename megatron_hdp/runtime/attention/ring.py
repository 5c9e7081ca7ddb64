# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ring attention of one micro-batch: ring shards and local sequences together.

Step 0 is one causal varlen call over everything this rank holds. In steps 1 .. P-1 the other
members' K/V arrive, while the previous ones are computed on; only the ring prefix takes part. In
layers with a sliding window a step is the calls that `windows` lists, often none, and only the rows
of K/V that these need are sent.
Forward and backward of the ring stand side by side below.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.attention.direct_transfers import DirectTransfers
from megatron_hdp.runtime.attention.kernels import Kernel
from megatron_hdp.runtime.attention.query_rows import BackwardRows, ForwardRows
from megatron_hdp.runtime.attention.transfers import RingTransfers
from megatron_hdp.runtime.micro_batch import AttentionCalls, DeviceRows, MicroBatchState


def ring_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: MicroBatchState,
    kernel: Kernel,
    scale: float,
    layer: int,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass, without autograd.

    Args:
        q: [T, H, D]; k, v: [T, G, D], contiguous.

    Returns:
        out [T, H, D] in q's dtype, and LSE [H, T] in float32 (float64 for float64).
    """
    calls = state.calls(window)
    transfers = _transfers(state, calls, layer, "forward", k, v)
    out, lse = kernel.forward(q, k, v, calls.own, True, scale)
    if transfers is None:
        return out, lse
    n = transfers.rows
    rows = ForwardRows(q[:n], out[:n], lse[:, :n])
    for hop, blocks in enumerate(calls.blocks):
        keys, values = transfers.kv(hop) if hop else (k, v)
        for call in blocks:
            query, k_rows = rows.take(call.q_rows), call.k_rows
            rows.merge(
                *kernel.forward(query, keys[k_rows], values[k_rows], call.arguments, False, scale)
            )
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
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The backward pass, without autograd, from what `ring_forward` returned.

    Returns:
        dq, dk, dv in the inputs' dtype; sums over blocks are kept, and dK/dV travel, in LSE's.
    """
    calls = state.calls(window)
    transfers = _transfers(state, calls, layer, "backward", k, v)
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, calls.own, True, scale)
    if transfers is None:
        return dq, dk, dv
    n = transfers.rows
    rows = BackwardRows((grad_out[:n], q[:n], out[:n]), lse[:, :n], dq[:n])
    own_parts: list[Part] = []
    for hop, blocks in enumerate(calls.blocks):
        keys, values = transfers.kv(hop) if hop else (k, v)
        parts: list[Part] = []
        for call in blocks:
            row_grad_out, query, row_out, row_lse = rows.take(call.q_rows)
            dq_block, dk_block, dv_block = kernel.backward(
                row_grad_out, query, keys[call.k_rows], values[call.k_rows], row_out, row_lse,
                call.arguments, False, scale,
            )  # fmt: skip
            rows.add(dq_block)
            parts.append((call.k_rows, dk_block, dv_block))
        if not hop:
            own_parts = parts
            continue
        # Only now: the sum travels while the blocks are computed.
        _add(transfers.dkv(hop, lse.dtype), parts)
        transfers.pass_dkv(hop)
    rows.finish()
    own = transfers.dkv(transfers.size, lse.dtype)
    _add(own, own_parts)
    dk[:n] += own[0]
    dv[:n] += own[1]
    return dq, dk, dv


def _transfers(
    state: MicroBatchState,
    calls: AttentionCalls,
    layer: int,
    phase: str,
    k: torch.Tensor,
    v: torch.Tensor,
) -> RingTransfers | DirectTransfers | None:
    """Begins the pass's transfers; None without a ring."""
    if not state.steps:
        return None
    if calls.direct is None:
        return RingTransfers(state, layer, phase, k, v)
    return DirectTransfers(state, calls.direct, layer, phase, k, v)


Part = tuple[DeviceRows, torch.Tensor, torch.Tensor]
"""K rows, and the dK and dV of them that a block gives."""


def _add(dkv: torch.Tensor, parts: list[Part]) -> None:
    for rows, dk, dv in parts:
        _add_rows(dkv[0], dk, rows)
        _add_rows(dkv[1], dv, rows)


def _add_rows(total: torch.Tensor, part: torch.Tensor, rows: DeviceRows) -> None:
    """Adds `part` to those rows of `total`, in total's dtype."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
