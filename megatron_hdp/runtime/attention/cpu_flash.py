# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's CPU FlashAttention, sequence by sequence.

Source: aten._scaled_dot_product_flash_attention_for_cpu and its backward. The op is 4-D
[B, H, S, D], needs unit stride in D, takes GQA natively, and crashes on empty q or k (none is
passed). A window is a mask; rows are cut, so that a mask stays small and few hidden keys are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_MASKED_ROWS = 256
"""Rows of a block with a mask; keys are these and the window's."""


class CpuFlash:
    """torch's CPU FlashAttention kernel"""

    name = "cpu_flash"

    @staticmethod
    def version() -> str | None:
        return None

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if device.type == "cpu" else "it runs on a CPU only"

    @staticmethod
    def window_refusal() -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for rows, columns in sequences(arguments):
            for block in _blocks(q[rows], k[columns], causal, arguments.window):
                out, lse = _forward(
                    _heads_first(q[rows][block.rows]),
                    _heads_first(k[columns][block.columns]),
                    _heads_first(v[columns][block.columns]),
                    0.0,
                    block.causal,
                    attn_mask=block.mask,
                    scale=scale,
                )
                outs.append(out[0].transpose(0, 1))
                lses.append(lse[0])
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs), torch.cat(lses, 1)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sums = []
        for rows, columns in sequences(arguments):
            parts: list[tuple[_Block, Tensors]] = []
            for block in _blocks(q[rows], k[columns], causal, arguments.window):
                gradients = _backward(
                    _heads_first(grad_out[rows][block.rows]),
                    _heads_first(q[rows][block.rows]),
                    _heads_first(k[columns][block.columns]),
                    _heads_first(v[columns][block.columns]),
                    _heads_first(out[rows][block.rows]),
                    lse[:, rows][:, block.rows][None].contiguous(),
                    0.0,
                    block.causal,
                    attn_mask=block.mask,
                    scale=scale,
                )
                dq, dk, dv = (gradient[0].transpose(0, 1) for gradient in gradients)
                parts.append((block, (dq, dk, dv)))
            sums.append(_sum(parts, k[columns]))
        if len(sums) == 1:
            return sums[0]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*sums, strict=True))
        return dq, dk, dv


class _Block(NamedTuple):
    """One call of the op."""

    rows: slice
    columns: slice
    causal: bool
    mask: torch.Tensor | None
    """Added to the scores: [rows, columns] of 0 and -inf."""


def _blocks(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None) -> Iterator[_Block]:
    """The calls for one sequence: one, or one for every few rows where a window hides keys."""
    if window is None or (causal and window >= len(k) - 1):
        yield _Block(slice(0, len(q)), slice(0, len(k)), causal, None)
        return
    behind = len(k) - len(q)
    for first in range(0, len(q), _MASKED_ROWS):
        end = min(first + _MASKED_ROWS, len(q))
        columns = slice(max(0, first + behind - window), end + behind if causal else len(k))
        hidden = hidden_keys(q, k, causal, window, rows=slice(first, end), columns=columns)
        mask = None
        if hidden is not None:
            zeros = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            mask = zeros.masked_fill_(hidden, float("-inf"))
        yield _Block(slice(first, end), columns, False, mask)


def _sum(parts: list[tuple[_Block, Tensors]], k: torch.Tensor) -> Tensors:
    """dq of all rows, and the sum of each key's dk and dv over the blocks."""
    if len(parts) == 1:
        return parts[0][1]
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    dkv = torch.zeros(2, *k.shape, dtype=wide, device=k.device)
    for block, (_, dk, dv) in parts:
        dkv[0, block.columns] += dk
        dkv[1, block.columns] += dv
    dk, dv = dkv.to(k.dtype)
    return torch.cat([dq for _, (dq, _, _) in parts]), dk, dv


def hidden_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    window: int | None,
    rows: slice | None = None,
    columns: slice | None = None,
) -> torch.Tensor | None:
    """Bool [q, k], true where a row does not see a key; None: every row sees all.

    Args:
        rows, columns: the part of it that is wanted.
    """
    if window is None and not causal:
        return None
    place = torch.arange(len(q), device=q.device)[rows or slice(None), None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)[columns or slice(None)]
    hidden = key > place if causal else torch.zeros_like(key > place)
    return hidden if window is None else hidden | (key < place - window)


def sequences(arguments: VarlenArguments) -> Iterator[tuple[slice, slice]]:
    """(q rows, k rows) of every sequence."""
    cu_q, cu_k = arguments.cu_q.tolist(), arguments.cu_k.tolist()
    for i in range(len(cu_q) - 1):
        yield slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[s, h, d] -> [1, h, s, d]; a last stride other than one makes the op silently wrong."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]
