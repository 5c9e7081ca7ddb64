# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rings of virtual ranks in one process, through the product's own ring.

`virtual_ring` runs every member on one device, where a transfer is a copy; `lone_member` runs one
member without the others, to time what it computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_hdp.planning.values import MicroBatch, Ring
from megatron_hdp.planning.values import Sequence as SequenceOf
from megatron_hdp.runtime.attention import Kernel
from megatron_hdp.runtime.attention.function import (
    AttentionPass,
    attention_backward,
    attention_forward,
)
from megatron_hdp.runtime.communicator import (
    Channel,
    DomainCommunicators,
    Peers,
    TransferLabel,
)
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.sharding import MicroBatchLayout

_TIMEOUT_S = 60
_LONGEST_RUN_S = 3600.0

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Turns:
    """Lets one virtual rank run at a time, as if the device were handed round.

    Ranks are threads only so that each keeps its place while it waits for another one. Nothing
    runs beside the one whose turn it is, so process time is the sum of the ranks' times.
    """

    def __init__(self) -> None:
        self._device = threading.Lock()
        self.copying_s = 0.0
        """CPU seconds spent in copies that stand for transfers."""

    def __enter__(self) -> None:
        self._device.acquire()

    def __exit__(self, *_: object) -> None:
        self._device.release()

    def wait(self, mailbox: queue.Queue[Any]) -> Any:
        """What comes into the mailbox; other ranks run meanwhile."""
        self._device.release()
        try:
            return mailbox.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"a virtual rank waited {_TIMEOUT_S} s for another one") from None
        finally:
            self._device.acquire()

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        begun = time.thread_time()
        to.copy_(source.view_as(to))
        self.copying_s += time.thread_time() - begun


class _VirtualTransfer:
    """What `exchange` returns between virtual ranks."""

    def __init__(
        self, turns: Turns, received: torch.Tensor, inbox: _Mailbox | None, outbox: _Mailbox | None
    ) -> None:
        self._turns = turns
        self._received = received
        self._inbox = inbox
        self._outbox = outbox

    def wait(self) -> torch.Tensor:
        if self._inbox is not None:
            self._turns.copy(self._turns.wait(self._inbox.sent), self._received)
            self._inbox.taken.put(None)
        if self._outbox is not None:
            # The sender may write into its buffer again only when it has been read.
            self._turns.wait(self._outbox.taken)
        return self._received


@dataclass
class _VirtualTransfers:
    """What `exchange_all` returns between virtual ranks."""

    transfers: Sequence[_VirtualTransfer]
    received: Peers

    def wait(self) -> Peers:
        for transfer in self.transfers:
            transfer.wait()
        return self.received


@dataclass
class _Mailbox:
    sent: queue.Queue[torch.Tensor] = field(default_factory=queue.Queue)
    taken: queue.Queue[None] = field(default_factory=queue.Queue)


@dataclass
class VirtualCommunicators(DomainCommunicators):
    """Transfers as copies on one device; every message is matched by its label."""

    turns: Turns = field(default_factory=Turns)
    mailboxes: dict[Any, _Mailbox] = field(default_factory=dict)
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
        inbox = outbox = None
        if sent.numel():
            outbox = self._mailbox(channel, self.rank, to, label)
            outbox.sent.put(sent)
            self.bytes_sent += sent.numel() * sent.element_size()
        if received.numel():
            inbox = self._mailbox(channel, source, self.rank, label)
        return _VirtualTransfer(self.turns, received, inbox, outbox)

    def exchange_all(  # type: ignore[override]
        self, channel: Channel, sent: Peers, received: Peers, *, label: TransferLabel
    ) -> _VirtualTransfers:
        nothing = torch.empty(0)
        outgoing = [
            self.exchange(channel, x, nothing, to=to, source=to, label=label) for to, x in sent
        ]
        arriving = [
            self.exchange(channel, nothing, x, to=source, source=source, label=label)
            for source, x in received
        ]
        return _VirtualTransfers([*arriving, *outgoing], received)

    def _mailbox(self, channel: Channel, source: int, to: int, label: TransferLabel) -> _Mailbox:
        return self.mailboxes.setdefault((channel, source, to, label), _Mailbox())


def rank_tensors(layout: MicroBatchLayout, whole: dict[int, Tensors]) -> Tensors:
    """A rank's q, k, v rows out of whole sequences, by sequence id; padding rows are zero."""
    q, k, v = (
        rank_rows(layout, {sequence: tensors[i] for sequence, tensors in whole.items()})
        for i in range(3)
    )
    return q, k, v


def rank_rows(layout: MicroBatchLayout, whole: dict[int, torch.Tensor]) -> torch.Tensor:
    """A rank's rows out of whole [s, ...] tensors, by sequence id; padding rows are zero."""
    rows = [whole[sequence][start:stop] for sequence, start, stop in layout.pieces]
    example = next(iter(whole.values()))
    return torch.cat([*rows, example.new_zeros(layout.padding, *example.shape[1:])])


@dataclass
class VirtualRank:
    """One rank of a virtual domain, with what it holds of a slot."""

    layout: MicroBatchLayout
    state: MicroBatchState
    inputs: Tensors
    grad_out: torch.Tensor

    def run(
        self, kernel: Kernel, window: int | None = None, sink: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """[out, dq, dk, dv] of this rank's rows, with a sink also its gradient.

        The other ranks must run too.
        """
        q, k, v = self.inputs
        scale = q.shape[-1] ** -0.5
        what = AttentionPass(self.state, kernel, scale, 1, window)
        out, saved = attention_forward(q, k, v, sink, what)
        *gradients, dsink = attention_backward(self.grad_out, saved, what)
        return [out, *gradients] if dsink is None else [out, *gradients, dsink]


def virtual_ranks(
    micro_batches: Sequence[MicroBatch],
    whole: dict[int, Tensors],
    grad_out: dict[int, torch.Tensor],
) -> list[VirtualRank]:
    """The ranks of a virtual domain, ready to run one slot.

    Args:
        micro_batches: rank r's micro-batch at index r.
        whole: sequence id -> its whole q, k, v.
        grad_out: sequence id -> gradient of its whole output.
    """
    turns, mailboxes = Turns(), dict[Any, _Mailbox]()
    ranks = []
    for rank, micro_batch in enumerate(micro_batches):
        layout = MicroBatchLayout.build(micro_batch, rank)
        communicators = VirtualCommunicators(
            tuple(range(len(micro_batches))), {},
            turns=turns, mailboxes=mailboxes, rank=rank,
        )  # fmt: skip
        inputs = rank_tensors(layout, whole)
        state = MicroBatchState.build(
            layout, step=0, slot=0, communicators=communicators, device=inputs[0].device
        )
        ranks.append(VirtualRank(layout, state, inputs, rank_rows(layout, grad_out)))
    return ranks


def run_virtual_ranks(
    ranks: Sequence[VirtualRank],
    kernel: Kernel,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> list[list[torch.Tensor]]:
    """Runs every rank's forward and backward: what `VirtualRank.run` gives, of each.

    Raises:
        RuntimeError: a rank failed.
    """
    results: list[list[torch.Tensor] | None] = [None] * len(ranks)

    def run(index: int) -> None:
        rank = ranks[index]
        with rank.state.communicators.turns:  # type: ignore[attr-defined]
            results[index] = rank.run(kernel, window, sink)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LONGEST_RUN_S
    for index, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise RuntimeError(f"virtual rank {index} still computes after {_LONGEST_RUN_S:.0f} s")
    finished = [result for result in results if result is not None]
    if len(finished) < len(ranks):
        raise RuntimeError("a virtual rank failed; its traceback is above")
    return finished


def virtual_ring(
    micro_batches: Sequence[MicroBatch],
    whole: dict[int, Tensors],
    grad_out: dict[int, torch.Tensor],
    kernel: Kernel,
    *,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> list[tuple[MicroBatchLayout, list[torch.Tensor]]]:
    """Runs one slot of every rank: each rank's layout, and what `VirtualRank.run` gives."""
    ranks = virtual_ranks(micro_batches, whole, grad_out)
    results = run_virtual_ranks(ranks, kernel, window, sink)
    return [(rank.layout, result) for rank, result in zip(ranks, results, strict=True)]


class _Echo:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def wait(self) -> torch.Tensor:
        return self._buffer


@dataclass
class EchoCommunicators(DomainCommunicators):
    """What a member sends first in a pass is what it receives in every hop, without a copy."""

    first: dict[Channel, torch.Tensor] = field(default_factory=dict)

    def exchange(  # type: ignore[override]
        self,
        channel: Channel,
        sent: torch.Tensor,
        received: torch.Tensor,
        *,
        to: int,
        source: int,
        label: TransferLabel,
    ) -> _Echo:
        if label.ring_step == 1:
            self.first[channel] = sent
        return _Echo(self.first[channel])


def lone_member(
    lengths: Sequence[int],
    ring_size: int,
    index: int,
    *,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> VirtualRank:
    """One member of a ring by itself, with random tensors: it computes as much, of no meaning.

    Args:
        lengths: the ring's sequences, multiples of 2 `ring_size`; local ones with a size of 1.
        heads: query heads H, key/value heads G, head dimension D.
    """
    sequences = tuple(SequenceOf(i, length) for i, length in enumerate(lengths))
    ring = Ring(tuple(range(ring_size))) if ring_size > 1 else None
    layout = MicroBatchLayout.build(
        MicroBatch(0, ring, sequences if ring else (), () if ring else sequences), index
    )
    communicators = EchoCommunicators(tuple(range(ring_size)), {})
    state = MicroBatchState.build(
        layout, step=0, slot=0, communicators=communicators, device=device
    )
    query_heads, groups, dim = heads
    q, k, v, grad_out = (
        torch.randn(layout.num_tokens, n, dim, device=device).to(dtype)
        for n in (query_heads, groups, groups, query_heads)
    )
    return VirtualRank(layout, state, (q, k, v), grad_out)
