# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A reference for packed causal attention, and rings of virtual ranks in one process.

Anyone can check a kernel on one device with them: `virtual_ring` runs every member's forward and
backward in threads that hand buffers to each other, through the product's own ring.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_hdp.planning.values import MicroBatch
from megatron_hdp.runtime.attention import Kernel, ring_attention
from megatron_hdp.runtime.communicator import Channel, DomainCommunicators, TransferLabel
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.sharding import MicroBatchLayout

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One whole sequence by plain products, differentiable: q [s, H, D], k and v [s, G, D]."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


class _VirtualTransfer:
    """What `exchange` returns between virtual ranks."""

    def __init__(self, mailbox: queue.Queue[torch.Tensor] | None, received: torch.Tensor) -> None:
        self._mailbox = mailbox
        self._received = received

    def wait(self) -> torch.Tensor:
        if self._mailbox is not None:
            self._received.copy_(self._mailbox.get(timeout=60).view_as(self._received))
        return self._received


@dataclass
class VirtualCommunicators(DomainCommunicators):
    """Transfers as copies between threads of one process; every message is matched by its label."""

    mailboxes: dict[Any, queue.Queue[torch.Tensor]] = field(default_factory=dict)
    rank: int = 0

    def exchange(  # type: ignore[override]
        self,
        channel: Channel,
        sent: torch.Tensor,
        received: torch.Tensor,
        *,
        to: int,
        source: int,
        label: TransferLabel,
    ) -> _VirtualTransfer:
        if sent.numel():
            self._mailbox(channel, self.rank, to, label).put(sent.clone())
            self.bytes_sent += sent.numel() * sent.element_size()
        mailbox = self._mailbox(channel, source, self.rank, label) if received.numel() else None
        return _VirtualTransfer(mailbox, received)

    def _mailbox(
        self, channel: Channel, source: int, to: int, label: TransferLabel
    ) -> queue.Queue[torch.Tensor]:
        return self.mailboxes.setdefault((channel, source, to, label), queue.Queue())


def rank_tensors(layout: MicroBatchLayout, whole: dict[int, Tensors]) -> Tensors:
    """A rank's q, k, v rows out of whole sequences, by sequence id; padding rows are zero."""
    parts = []
    for i in range(3):
        rows = [whole[sequence][i][start:stop] for sequence, start, stop in layout.pieces]
        example = next(iter(whole.values()))[i]
        rows.append(example.new_zeros(layout.padding, *example.shape[1:]))
        parts.append(torch.cat(rows))
    return parts[0], parts[1], parts[2]


def virtual_ring(
    micro_batches: Sequence[MicroBatch],
    whole: dict[int, Tensors],
    grad_out: dict[int, torch.Tensor],
    kernel: Kernel,
) -> list[tuple[MicroBatchLayout, list[torch.Tensor]]]:
    """Runs one slot of every rank and returns each rank's layout and [out, dq, dk, dv].

    Args:
        micro_batches: rank r's micro-batch at index r.
        whole: sequence id -> its whole q, k, v.
        grad_out: sequence id -> gradient of its whole output.
    """
    mailboxes: dict[Any, queue.Queue[torch.Tensor]] = {}
    results: list[Any] = [None] * len(micro_batches)

    def run(rank: int) -> None:
        layout = MicroBatchLayout.build(micro_batches[rank], rank)
        communicators = VirtualCommunicators(
            tuple(range(len(micro_batches))), {}, mailboxes=mailboxes, rank=rank
        )
        q, k, v = (x.detach().requires_grad_() for x in rank_tensors(layout, whole))
        state = MicroBatchState.build(
            layout, step=0, slot=0, communicators=communicators, device=q.device
        )
        out = ring_attention(
            q, k, v, state, kernel=kernel, softmax_scale=q.shape[-1] ** -0.5,
            layer_number=1,
        )  # fmt: skip
        rows = [grad_out[sequence][start:stop] for sequence, start, stop in layout.pieces]
        gradient = torch.cat([*rows, out.new_zeros(layout.padding, *out.shape[1:])])
        # autograd.grad runs on this thread for CPU tensors, so ranks do not wait for one engine.
        results[rank] = (layout, [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(micro_batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if any(result is None for result in results):
        raise RuntimeError("a virtual rank failed; its traceback is above")
    return results


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
