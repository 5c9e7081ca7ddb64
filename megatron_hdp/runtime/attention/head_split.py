# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention of a micro-batch whose ring splits heads: exchange, shorter ring, exchange back.

The u members of a group send each other the heads that the other one has from then on, and get the
group's tokens of their own heads. On these runs the ring of P/u, by the same code. Local sequences
keep all heads; they are computed while the first exchange is under way.
Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from megatron_hdp.runtime.attention.kernels import Kernel
from megatron_hdp.runtime.attention.ring import ring_backward, ring_forward
from megatron_hdp.runtime.attention.sinks import add_sink, sink_gradient
from megatron_hdp.runtime.communicator import Channel, TransferLabel
from megatron_hdp.runtime.micro_batch import HeadSplitState, MicroBatchState

Tensors = list[torch.Tensor]


class HeadsHere(NamedTuple):
    """What backward needs. Of the group's tokens with my heads:"""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    rest_q: torch.Tensor | None
    """From here of local sequences and padding with all heads; None without any."""
    rest_k: torch.Tensor | None
    rest_v: torch.Tensor | None
    rest_lse: torch.Tensor | None
    whole_out: torch.Tensor | None
    """What forward returned, whose last rows are theirs: a view of it would hold the graph."""


def heads_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    state: MicroBatchState,
    split: HeadSplitState,
    kernel: Kernel,
    scale: float,
    layer: int,
) -> tuple[torch.Tensor, HeadsHere]:
    """The forward pass, without autograd.

    Args:
        q: [T, H, D]; k, v: [T, G, D], contiguous; sink: [H].

    Returns:
        out [T, H, D] in q's dtype, and what `heads_backward` is to be handed.

    Raises:
        RuntimeError: the plan's degree does not divide the heads.
    """
    size = len(split.members)
    if q.shape[1] % size or k.shape[1] % size:
        raise RuntimeError(
            f"layer {layer} has {q.shape[1]} query and {k.shape[1]} key/value heads, which {size} "
            f"ring members cannot split: pass --hdp-head-parallel off."
        )
    n = state.layout.ring_tokens
    exchange = _Exchange(state, split, layer, "heads forward")
    arriving = exchange.to_heads([q[:n], k[:n], v[:n]])
    out = torch.empty_like(q)
    rest: tuple[torch.Tensor | None, ...] = (None,) * 5
    if split.rest is not None:
        # Copies: what is saved for backward must not keep the ring's rows beside it.
        rest_q, rest_k, rest_v = (x[n:].clone() if n else x for x in (q, k, v))
        rest_out, rest_lse = kernel.forward(rest_q, rest_k, rest_v, split.rest, True, scale)
        if sink is not None:
            add_sink(rest_out, rest_lse, sink)
        out[n:] = rest_out
        rest = (rest_q, rest_k, rest_v, rest_lse, out)
    my_q, my_k, my_v = arriving()
    del arriving  # with it go what was sent and what came, before the short ring
    my_out, lse = ring_forward(my_q, my_k, my_v, split.shared, kernel, scale, layer)
    if sink is not None:
        add_sink(my_out, lse, sink[exchange.mine(sink.shape[0])])
    exchange.to_tokens([my_out], [out[:n]])
    return out, HeadsHere(my_q, my_k, my_v, my_out, lse, *rest)


def heads_backward(
    grad_out: torch.Tensor,
    saved: HeadsHere,
    sink: torch.Tensor | None,
    state: MicroBatchState,
    split: HeadSplitState,
    kernel: Kernel,
    scale: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The backward pass, without autograd: dq, dk, dv, and of a sink its gradient's part here.

    Args:
        sink: [H]; None: there is none, or its gradient is not wanted.
    """
    n = state.layout.ring_tokens
    exchange = _Exchange(state, split, layer, "heads backward")
    arriving = exchange.to_heads([grad_out[:n]])
    q, k, v, out, lse = (x for x in saved[:5] if x is not None)
    dsink = None if sink is None else torch.zeros_like(sink)
    whole_groups = k.shape[1] * len(split.members)
    dq = torch.empty_like(grad_out)
    dk, dv = (k.new_empty(len(grad_out), whole_groups, k.shape[2]) for _ in range(2))
    if split.rest is not None:
        rest_q, rest_k, rest_v, rest_lse, whole_out = (x for x in saved[5:] if x is not None)
        rest_out = whole_out[n:]
        dq[n:], dk[n:], dv[n:] = kernel.backward(
            grad_out[n:], rest_q, rest_k, rest_v, rest_out, rest_lse, split.rest, True, scale
        )
        if dsink is not None and sink is not None:
            dsink += sink_gradient(grad_out[n:], rest_out, rest_lse, sink)
    (my_grad_out,) = arriving()
    del arriving
    gradients = ring_backward(my_grad_out, q, k, v, out, lse, split.shared, kernel, scale, layer)
    if dsink is not None and sink is not None:
        mine = exchange.mine(len(sink))
        dsink[mine] += sink_gradient(my_grad_out, out, lse, sink[mine])
    exchange.to_tokens(list(gradients), [dq[:n], dk[:n], dv[:n]])
    return dq, dk, dv, dsink


class _Exchange:
    """One pass's exchanges over one layer."""

    def __init__(
        self,
        state: MicroBatchState,
        split: HeadSplitState,
        layer: int,
        phase: Literal["heads forward", "heads backward"],
    ) -> None:
        self._state = state
        self._split = split
        self._layer = layer
        self._phase = phase
        self._size = len(split.members)

    def mine(self, heads: int) -> slice:
        """My heads among all."""
        return self._of(self._split.place, heads)

    def to_heads(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Posts the exchange that splits heads.

        Args:
            tensors: each [n, h, D], this member's rows with all heads.

        Returns:
            To be called once: waits, and gives each as [T', h/u, D], T' tokens of the group.
        """
        sent = [
            _joined([x[:, self._of(member, x.shape[1])] for x in tensors])
            for member in range(self._size)
        ]
        received = [
            sent[member].new_empty(_count(rows), *sent[member].shape[1:])
            for member, rows in enumerate(self._split.rows)
        ]
        wait = self._post("kv", sent, received)

        def finish() -> Tensors:
            wait()
            # Rows that nobody sends are masked; they must hold numbers all the same.
            layout = self._split.shared.layout
            whole = [
                (x.new_zeros if layout.padding else x.new_empty)(
                    layout.num_tokens, x.shape[1] // self._size, x.shape[2]
                )
                for x in tensors
            ]
            for rows, part in zip(self._split.rows, received, strict=True):
                for to, piece in zip(whole, _parted(part, whole), strict=True):
                    _set_rows(to, rows, piece)
            return whole

        return finish

    def to_tokens(self, tensors: Tensors, whole: Tensors) -> None:
        """The exchange back.

        Args:
            tensors: each [T', h/u, D], the group's rows with this member's heads.
            whole: each [n, h, D], this member's rows, filled in place.
        """
        sent = [_joined([x[rows] for x in tensors]) for rows in self._split.rows]
        mine = sent[self._split.place]
        received = [torch.empty_like(mine) for _ in range(self._size)]
        self._post("dkv", sent, received)()
        for member, part in enumerate(received):
            for to, piece in zip(whole, _parted(part, tensors), strict=True):
                to[:, self._of(member, to.shape[1])] = piece

    def _post(self, channel: Channel, sent: Tensors, received: Tensors) -> Callable[[], None]:
        """Exchanges with every other member; what a member has for itself takes no transfer."""
        members, place = self._split.members, self._split.place
        received[place] = sent[place]
        layout = self._state.layout
        label = TransferLabel(
            self._state.step, self._state.slot, self._layer, self._phase, 0, layout.ring or ()
        )
        transfer = self._state.communicators.exchange_all(
            channel,
            _with_ranks(members, sent, place),
            _with_ranks(members, received, place),
            label=label,
        )

        def wait() -> None:
            transfer.wait()

        return wait

    def _of(self, member: int, heads: int) -> slice:
        share = heads // self._size
        return slice(member * share, (member + 1) * share)


def _with_ranks(
    members: Sequence[int], tensors: Tensors, place: int
) -> list[tuple[int, torch.Tensor]]:
    return [
        (rank, tensor)
        for number, (rank, tensor) in enumerate(zip(members, tensors, strict=True))
        if number != place
    ]


def _joined(tensors: Tensors) -> torch.Tensor:
    """One contiguous buffer, heads side by side."""
    return torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous()


def _parted(joined: torch.Tensor, like: Tensors) -> Sequence[torch.Tensor]:
    return joined.split([x.shape[1] for x in like], 1)


def _count(rows: slice | torch.Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _set_rows(to: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        to[rows] = values
    else:
        to.index_copy_(0, rows, values)
