# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A member's own rows in the steps of its ring.

K/V of earlier members come first and meet all rows, then those of later ones, which meet the second
halves only. One sequence's second half is a slice; several sequences' are gathered once, when they
first take part, and put back after they last do.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.micro_batch import DeviceRows


class ForwardRows:
    """q, and what its softmax has come to so far: an output in LSE's dtype, and the LSE."""

    def __init__(self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """q, out: [n, H, D]; lse: [H, n]. `finish` leaves the result in out and lse."""
        self._q = q
        self._out = out
        self._lse = lse
        self._total = out if out.dtype == lse.dtype else out.to(lse.dtype)
        self._taken: DeviceRows = slice(0)
        self._rows = (q, self._total, lse)

    def take(self, rows: DeviceRows) -> torch.Tensor:
        """q of the rows that the next block is merged into."""
        if not _same(rows, self._taken):
            self._put_back()
            self._taken = rows
            self._rows = (self._q[rows], self._total[rows], self._lse[:, rows])
        return self._rows[0]

    def merge(self, block: torch.Tensor, block_lse: torch.Tensor) -> None:
        """Takes a block's softmax over further keys into the rows taken, without overflow."""
        _, total, lse = self._rows
        weight = torch.sigmoid(block_lse - lse).T[..., None]
        total.lerp_(block.to(total.dtype), weight)
        torch.logaddexp(lse, block_lse, out=lse)

    def finish(self) -> None:
        self._put_back()
        if self._total is not self._out:
            self._out.copy_(self._total)

    def _put_back(self) -> None:
        if isinstance(self._taken, torch.Tensor):
            _, total, lse = self._rows
            self._total.index_copy_(0, self._taken, total)
            self._lse.index_copy_(1, self._taken, lse)


class BackwardRows:
    """What a block's backward reads of my rows, and the dq that comes of it."""

    def __init__(
        self,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lse: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:
        """saved: grad_out, q, out; dq: [n, H, D]; lse: [H, n]. `finish` leaves the sum in dq."""
        self._saved = saved
        self._lse = lse
        self._dq = dq
        self._total = dq if dq.dtype == lse.dtype else dq.to(lse.dtype)
        self._taken: DeviceRows = slice(0)
        self._rows = (*saved, lse)
        self._sum = self._total

    def take(
        self, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """grad_out, q, out and a contiguous LSE of the rows that the next block is about."""
        if not _same(rows, self._taken):
            self._put_back()
            self._taken = rows
            grad_out, q, out = (x[rows] for x in self._saved)
            self._rows = (grad_out, q, out, self._lse[:, rows].contiguous())
            self._sum = self._total[rows]
        return self._rows

    def add(self, dq: torch.Tensor) -> None:
        self._sum += dq

    def finish(self) -> None:
        self._put_back()
        if self._total is not self._dq:
            self._dq.copy_(self._total)

    def _put_back(self) -> None:
        if isinstance(self._taken, torch.Tensor):
            self._total.index_copy_(0, self._taken, self._sum)


def _same(rows: DeviceRows, others: DeviceRows) -> bool:
    """Whether both are the same rows; index tensors are shared by the steps that need the same."""
    if isinstance(rows, slice) and isinstance(others, slice):
        return rows == others
    return rows is others
