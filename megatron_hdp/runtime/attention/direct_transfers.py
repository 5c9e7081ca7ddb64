# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""K/V straight to the members that see them, and dK/dV straight back: layers with a window.

Few rows of others' K/V are seen, mostly two neighbours'. They go without a detour over members that
do not need them, and what no member sees is not sent.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.communicator import Channel, Transfer, TransferLabel
from megatron_hdp.runtime.micro_batch import DirectRows, MicroBatchState

_AHEAD = 2
"""Hops under way at a time: with a narrow window all there are, the neighbour on either side."""


class DirectTransfers:
    """One ring member's transfers in a forward or a backward pass; used as RingTransfers is.

    Hop h: rows of mine go to the member h places behind me, rows of the one h places before me
    come. Every member takes its hops in this order, so none waits for one that waits for it.
    """

    def __init__(
        self,
        state: MicroBatchState,
        direct: DirectRows,
        layer: int,
        phase: str,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        layout = state.layout
        assert layout.ring is not None
        self.rows = layout.ring_tokens
        self.size = len(layout.ring)
        self._state, self._direct = state, direct
        self._ring, self._index = layout.ring, layout.index
        self._layer, self._phase = layer, phase
        self._k, self._v = k[: self.rows], v[: self.rows]
        self._hops = [
            hop
            for hop in range(1, self.size)
            if direct.received[hop] or direct.sent[hop] is not None
        ]
        self._kv: dict[int, Transfer[torch.Tensor]] = {}
        self._unsent = iter(self._hops)
        self._sum: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._arriving_dkv: tuple[int, Transfer[torch.Tensor]] | None = None
        for _ in range(_AHEAD):
            self._send_next()

    def kv(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [rows, G, D] of the rows that are seen here of the member `hop` places before."""
        if hop not in self._kv:
            return self._k[:0], self._v[:0]
        keys, values = self._kv.pop(hop).wait()
        self._send_next()
        return keys, values

    def dkv(self, hop: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [2, rows, G, D] to add dK and dV of the hop's rows to, and to pass on.

        After the last hop: the sum [2, ring rows, G, D] of what the others sent of this member's.
        """
        if self._total is None:
            self._total = self._k.new_zeros(2, *self._k.shape, dtype=dtype)
        if hop == self.size:
            self._take_in()
            return self._total
        shape = (2, self._direct.received[hop], *self._k.shape[1:])
        self._sum = self._k.new_zeros(shape, dtype=dtype)
        return self._sum

    def pass_dkv(self, hop: int) -> None:
        """Sends the sum to its rows' owner; what another member has of mine comes meanwhile."""
        self._take_in()
        if hop not in self._hops:
            return
        assert self._sum is not None
        received = self._sum.new_empty(2, self._rows_sent(hop), *self._k.shape[1:])
        self._arriving_dkv = hop, self._exchange("dkv", self._sum, received, hop, back=True)

    def _take_in(self) -> None:
        if self._arriving_dkv is None:
            return
        hop, transfer = self._arriving_dkv
        self._arriving_dkv = None
        received, rows = transfer.wait(), self._direct.sent[hop]
        assert self._total is not None
        if isinstance(rows, slice):
            self._total[:, rows] += received
        elif rows is not None:
            self._total.index_add_(1, rows, received)

    def _send_next(self) -> None:
        hop = next(self._unsent, None)
        if hop is None:
            return
        rows = self._direct.sent[hop]
        chosen = slice(0) if rows is None else rows
        sent = torch.stack((self._k[chosen], self._v[chosen]))
        received = sent.new_empty(2, self._direct.received[hop], *self._k.shape[1:])
        self._kv[hop] = self._exchange("kv", sent, received, hop)

    def _rows_sent(self, hop: int) -> int:
        rows = self._direct.sent[hop]
        if rows is None:
            return 0
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def _exchange(
        self,
        channel: Channel,
        sent: torch.Tensor,
        received: torch.Tensor,
        hop: int,
        back: bool = False,
    ) -> Transfer[torch.Tensor]:
        label = TransferLabel(
            self._state.step, self._state.slot, self._layer, self._phase, hop, self._ring
        )
        behind = self._ring[(self._index + hop) % self.size]
        before = self._ring[(self._index - hop) % self.size]
        to, source = (before, behind) if back else (behind, before)
        return self._state.communicators.exchange(
            channel, sent, received, to=to, source=source, label=label
        )
