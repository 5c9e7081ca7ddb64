# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's CPU FlashAttention, sequence by sequence.

Source: aten._scaled_dot_product_flash_attention_for_cpu and its backward. The op is 4-D
[B, H, S, D], needs unit stride in D, takes GQA natively, and crashes on empty q or k (none is
passed).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """torch's CPU FlashAttention kernel"""

    name = "cpu_flash"

    @staticmethod
    def version() -> str | None:
        return None

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None if device.type == "cpu" else "it runs on a CPU only"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = []
        for rows, columns in _sequences(arguments):
            block, lse = _forward(
                _heads_first(q[rows]),
                _heads_first(k[columns]),
                _heads_first(v[columns]),
                0.0,
                causal,
                scale=scale,
            )
            blocks.append((block[0].transpose(0, 1), lse[0]))
        if len(blocks) == 1:
            return blocks[0]
        outs, lses = zip(*blocks, strict=True)
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
        blocks = []
        for rows, columns in _sequences(arguments):
            parts = _backward(
                _heads_first(grad_out[rows]),
                _heads_first(q[rows]),
                _heads_first(k[columns]),
                _heads_first(v[columns]),
                _heads_first(out[rows]),
                lse[:, rows][None].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            blocks.append([part[0].transpose(0, 1) for part in parts])
        if len(blocks) == 1:
            dq, dk, dv = blocks[0]
        else:
            dq, dk, dv = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        return dq, dk, dv


def _sequences(arguments: VarlenArguments) -> Iterator[tuple[slice, slice]]:
    """(q rows, k rows) of every sequence."""
    cu_q, cu_k = arguments.cu_q.tolist(), arguments.cu_k.tolist()
    for i in range(len(cu_q) - 1):
        yield slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[s, h, d] -> [1, h, s, d]; a last stride other than one makes the op silently wrong."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]
