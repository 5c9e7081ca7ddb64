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
from megatron_hdp.runtime.communicator import Channel, Transfer, TransferLabel
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
    """Causal attention of every sequence of a micro-batch, over its ring.

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
        ring = _Ring(state, layer, "forward")
        transfer = ring.start_kv(k, v)
        out, lse = kernel.forward(q, k, v, state.own, True, scale)
        if transfer is not None:
            out = _ring_forward(ring, transfer, q, out, lse, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.state, ctx.kernel, ctx.scale, ctx.layer = state, kernel, scale, layer
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        ring = _Ring(ctx.state, ctx.layer, "backward")
        transfer = ring.start_kv(k, v)
        dq, dk, dv = ctx.kernel.backward(
            grad_out, q, k, v, out, lse, ctx.state.own, True, ctx.scale
        )
        if transfer is not None:
            saved = (grad_out, q, out, lse)
            dq, dk, dv = _ring_backward(ring, transfer, saved, dq, dk, dv, ctx.kernel, ctx.scale)
        return dq, dk, dv, None, None, None, None


def _ring_forward(
    ring: _Ring,
    transfer: Transfer,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kernel: Kernel,
    scale: float,
) -> torch.Tensor:
    """Merges every arriving block into out [T, H, D] and, in place, into lse [H, T]."""
    n = ring.rows
    accumulated, merged_lse = out[:n].to(lse.dtype), lse[:, :n].clone()
    for number, step in enumerate(ring.state.steps, start=1):
        keys, values, transfer = ring.next_kv(transfer, number)
        if step.arguments is None:
            continue
        block, block_lse = kernel.forward(
            _take(q[:n], step.q_rows), _take(keys, step.k_rows), _take(values, step.k_rows),
            step.arguments, False, scale,
        )  # fmt: skip
        _merge(accumulated, merged_lse, block, block_lse, step.q_rows)
    lse[:, :n] = merged_lse
    result = out.clone()
    result[:n] = accumulated.to(out.dtype)
    return result


def _ring_backward(
    ring: _Ring,
    transfer: Transfer,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    kernel: Kernel,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds the ring's part to dq, dk, dv. A source's dK/dV travel behind its K/V, and home."""
    grad_out, q, out, lse = saved
    n, wide = ring.rows, lse.dtype
    ring_dq, arriving = dq[:n].to(wide), None
    for number, step in enumerate(ring.state.steps, start=1):
        keys, values, transfer = ring.next_kv(transfer, number)
        dkv = torch.zeros(2, *keys.shape, dtype=wide, device=keys.device)
        if step.arguments is not None:
            dq_block, dk_block, dv_block = kernel.backward(
                _take(grad_out[:n], step.q_rows), _take(q[:n], step.q_rows),
                _take(keys, step.k_rows), _take(values, step.k_rows),
                _take(out[:n], step.q_rows), _take_columns(lse[:, :n], step.q_rows),
                step.arguments, False, scale,
            )  # fmt: skip
            _add(ring_dq, dq_block, step.q_rows)
            _add(dkv[0], dk_block, step.k_rows)
            _add(dkv[1], dv_block, step.k_rows)
        if arriving is not None:
            dkv += arriving.wait().view_as(dkv)
        arriving = ring.pass_dkv(dkv, number)
    assert arriving is not None
    own = arriving.wait().view(2, n, *dk.shape[1:])
    dq, dk, dv = dq.clone(), dk.clone(), dv.clone()
    dq[:n] = ring_dq.to(dq.dtype)
    dk[:n] = (dk[:n].to(wide) + own[0]).to(dk.dtype)
    dv[:n] = (dv[:n].to(wide) + own[1]).to(dv.dtype)
    return dq, dk, dv


class _Ring:
    """The transfers of one pass over one layer: who sends what to whom, and how large it is."""

    def __init__(self, state: MicroBatchState, layer: int, phase: str) -> None:
        layout = state.layout
        self.state = state
        self.rows = layout.ring_tokens
        self._ranks = layout.ring or ()
        self._index = layout.index
        self._layer = layer
        self._phase = phase

    def _source(self, number: int) -> int:
        """Ring index whose K/V are here after `number` hops."""
        return (self._index - number) % len(self._ranks)

    def _exchange(
        self, channel: Channel, sent: torch.Tensor, received: torch.Tensor, number: int
    ) -> Transfer:
        label = TransferLabel(
            self.state.step, self.state.slot, self._layer, self._phase, number, self._ranks
        )
        size = len(self._ranks)
        return self.state.communicators.exchange(
            channel,
            sent,
            received,
            to=self._ranks[(self._index + 1) % size],
            source=self._ranks[(self._index - 1) % size],
            label=label,
        )

    def start_kv(self, k: torch.Tensor, v: torch.Tensor) -> Transfer | None:
        """Sends my ring rows' K|V in one buffer; None without a ring."""
        if not self._ranks:
            return None
        return self._send_kv(torch.stack((k[: self.rows], v[: self.rows])), 1)

    def _send_kv(self, kv: torch.Tensor, number: int) -> Transfer:
        rows = self.state.layout.peer_ring_tokens[self._source(number)]
        received = torch.empty(2, rows, *kv.shape[2:], dtype=kv.dtype, device=kv.device)
        return self._exchange("kv", kv, received, number)

    def next_kv(
        self, transfer: Transfer, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, Transfer]:
        """K and V after hop `number`; the next hop is under way when this returns."""
        kv = transfer.wait()
        if number < len(self._ranks) - 1:
            transfer = self._send_kv(kv, number + 1)
        return kv[0], kv[1], transfer

    def pass_dkv(self, dkv: torch.Tensor, number: int) -> Transfer:
        """Sends a source's sum on; what arrives belongs to the next hop's source, in the end me."""
        rows = self.state.layout.peer_ring_tokens[self._source(number + 1)]
        received = torch.empty(2, rows, *dkv.shape[2:], dtype=dkv.dtype, device=dkv.device)
        return self._exchange("dkv", dkv, received, number)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    block: torch.Tensor,
    block_lse: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Adds a block's softmax part to out [n, H, D] and lse [H, n], in place, without overflow."""
    mine, mine_lse = (out, lse) if rows is None else (out[rows], lse[:, rows])
    both = torch.logaddexp(mine_lse, block_lse)
    old, new = (torch.exp(part - both).T[..., None] for part in (mine_lse, block_lse))
    merged = mine * old + block.to(out.dtype) * new
    if rows is None:
        out.copy_(merged)
        lse.copy_(both)
    else:
        out[rows] = merged
        lse[:, rows] = both


def _take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


def _take_columns(x: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    return (x if columns is None else x[:, columns]).contiguous()


def _add(total: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | None) -> None:
    if rows is None:
        total += part.to(total.dtype)
    else:
        total.index_add_(0, rows, part.to(total.dtype))
