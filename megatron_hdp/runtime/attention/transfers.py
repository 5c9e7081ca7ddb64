# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The K/V and dK/dV transfers of one pass over one layer: who sends what to whom, and how much."""

from __future__ import annotations

import torch

from megatron_hdp.runtime.communicator import Channel, Transfer, TransferLabel
from megatron_hdp.runtime.micro_batch import MicroBatchState


class RingTransfers:
    """One ring member's transfers in a forward or a backward pass.

    After `hop` hops the K/V of the member `hop` places before me are here. K/V and dK/dV have two
    buffers each: what is here is in use and on its way on, while the next fills the other one.
    """

    def __init__(
        self, state: MicroBatchState, layer: int, phase: str, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        layout = state.layout
        assert layout.ring is not None
        self.rows = layout.ring_tokens
        self.size = len(layout.ring)
        self._state = state
        self._ring = layout.ring
        self._index = layout.index
        self._layer = layer
        self._phase = phase
        self._peer_rows = layout.peer_ring_tokens
        self._kv = _BufferPair(max(self._peer_rows), k, k.dtype)
        self._dkv: _BufferPair | None = None
        mine = self._kv.at(0, self.rows)
        mine[0].copy_(k[: self.rows])
        mine[1].copy_(v[: self.rows])
        self._arriving_kv = self._pass_kv(0)
        self._arriving_dkv: Transfer[torch.Tensor] | None = None

    def kv(self, hop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [rows, G, D] after `hop` hops; they are passed on before they are used."""
        keys, values = self._arriving_kv.wait()
        if hop < self.size - 1:
            self._arriving_kv = self._pass_kv(hop)
        return keys, values

    def dkv(self, hop: int, dtype: torch.dtype) -> torch.Tensor:
        """The sum [2, rows, G, D] of dK and dV so far, for the K/V that are here after `hop` hops.

        It is to be added to in place, and passed on.
        """
        if self._arriving_dkv is not None:
            return self._arriving_dkv.wait()
        self._dkv = _BufferPair(max(self._peer_rows), self._kv.at(0, 0)[0], dtype)
        return self._dkv.at(hop, self._rows_after(hop)).zero_()

    def pass_dkv(self, hop: int) -> None:
        """Sends the sum behind its K/V; it reaches its owner one hop after the last user."""
        assert self._dkv is not None
        sent = self._dkv.at(hop, self._rows_after(hop))
        received = self._dkv.at(hop + 1, self._rows_after(hop + 1))
        self._arriving_dkv = self._exchange("dkv", sent, received, hop)

    def _pass_kv(self, hop: int) -> Transfer[torch.Tensor]:
        sent = self._kv.at(hop, self._rows_after(hop))
        received = self._kv.at(hop + 1, self._rows_after(hop + 1))
        return self._exchange("kv", sent, received, hop + 1)

    def _rows_after(self, hop: int) -> int:
        return self._peer_rows[(self._index - hop) % self.size]

    def _exchange(
        self, channel: Channel, sent: torch.Tensor, received: torch.Tensor, number: int
    ) -> Transfer[torch.Tensor]:
        label = TransferLabel(
            self._state.step, self._state.slot, self._layer, self._phase, number, self._ring
        )
        return self._state.communicators.exchange(
            channel,
            sent,
            received,
            to=self._ring[(self._index + 1) % self.size],
            source=self._ring[(self._index - 1) % self.size],
            label=label,
        )


class _BufferPair:
    """Two buffers that any member's shard fits in, taken in turns."""

    def __init__(self, most_rows: int, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._shape = like.shape[1:]
        self._row = self._shape.numel()
        self._storage = torch.empty(2, 2 * most_rows * self._row, dtype=dtype, device=like.device)

    def at(self, hop: int, rows: int) -> torch.Tensor:
        """Contiguous [2, rows, G, D] of the buffer whose turn is `hop`."""
        return self._storage[hop % 2][: 2 * rows * self._row].view(2, rows, *self._shape)
