# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's built-in FlashAttention on CUDA. No GPU has run this yet.

Source: aten._flash_attention_forward and _backward (torch 2.11 to 2.13); torch's own switch
`activate_flash_attention_impl` puts FlashAttention 3 or 4 behind the same ops.
"""

from __future__ import annotations

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments

_MAX_HEAD_DIM = 256


class TorchFlash:
    """torch's built-in FlashAttention on CUDA (not yet run on a GPU)"""

    name = "torch_flash"

    def __init__(self) -> None:
        # Only dropout reads the generator state that backward asks for.
        self._rng: torch.Tensor | None = None

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return "it needs a CUDA device"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 and bfloat16, not {dtype}: pass --bf16"
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"it takes head dims that are multiples of 8 up to 256, not {head_dim}"
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
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, arguments.cu_q, arguments.cu_k, arguments.max_q, arguments.max_k,
            0.0, causal, False, scale=scale,
        )  # fmt: skip
        return out, lse

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
        if self._rng is None:
            self._rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(), q, k, v, out.to(q.dtype), lse.contiguous(),
            arguments.cu_q, arguments.cu_k, arguments.max_q, arguments.max_k,
            0.0, causal, self._rng, unused, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
