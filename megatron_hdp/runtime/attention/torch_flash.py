# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's built-in FlashAttention on CUDA. No GPU has run this yet.

Source: aten._flash_attention_forward and _backward (torch 2.11 to 2.13). Torch's own switch
`activate_flash_attention_impl` puts FlashAttention 3 or 4 behind the same ops, for the whole
process; the two subclasses here throw it. In deterministic mode the ops read torch's global flag.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import ClassVar

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments

_MAX_HEAD_DIM = 256


def flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What every FlashAttention on CUDA refuses, in a phrase, else None."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}: pass --bf16"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"it takes head dims that are multiples of 8 up to 256, not {head_dim}"
    return None


def import_refusal(module: str, package: str) -> str | None:
    """Why `module` cannot be imported, in a phrase; None when it can.

    Extensions built for another torch fail with any error there is, not with ImportError alone.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"{package} is not installed ({error})"
    except Exception as error:
        return f"{package} is installed but does not import ({error})"
    return None


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def no_decode_path(max_q: int) -> int:
    """A longest query of 1 sends FlashAttention 2 down its decoding path, which regroups heads."""
    return max(max_q, 2)


def window_keywords(arguments: VarlenArguments, causal: bool) -> dict[str, int]:
    """FlashAttention's window. -1 is an open side; a causal call closes the right one itself."""
    left = -1 if arguments.window is None else arguments.window
    return {"window_size_left": left, "window_size_right": 0 if causal and left >= 0 else -1}


def active_implementation() -> str | None:
    """The implementation that torch's switch has put behind the ops; None: torch's built-in one."""
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl()


class TorchFlash:
    """torch's built-in FlashAttention on CUDA (not yet run on a GPU)"""

    name = "torch_flash"

    def __init__(self) -> None:
        # Only dropout reads the generator state that backward asks for.
        self._rng: torch.Tensor | None = None

    @classmethod
    def version(cls) -> str | None:
        return active_implementation() or "built-in"

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return flash_refusal(device, dtype, head_dim)

    @classmethod
    def window_refusal(cls) -> str | None:
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
            q, k, v, arguments.cu_q, arguments.cu_k, no_decode_path(arguments.max_q),
            arguments.max_k, 0.0, causal, False, scale=scale,
            **window_keywords(arguments, causal),
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
            0.0, causal, self._rng, unused, scale=scale, **window_keywords(arguments, causal),
        )  # fmt: skip
        return dq, dk, dv


class _Switched(TorchFlash):
    """torch's ops with another implementation behind them, switched on with the first use."""

    implementation: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]
    capabilities: ClassVar[tuple[int, ...]]

    def __init__(self) -> None:
        from torch.nn.attention import activate_flash_attention_impl

        super().__init__()
        if active_implementation() != self.implementation:
            activate_flash_attention_impl(self.implementation)

    @classmethod
    def version(cls) -> str | None:
        return installed_version(cls.distribution)

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = flash_refusal(device, dtype, head_dim)
        if reason is not None:
            return reason
        major = torch.cuda.get_device_capability(device)[0]
        if major not in cls.capabilities:
            wanted = " or ".join(f"{capability}.x" for capability in cls.capabilities)
            return f"torch runs {cls.implementation} on compute capability {wanted}, not {major}.x"
        return import_refusal(cls.module, cls.distribution)


class TorchFlash3(_Switched):
    """torch's ops with FlashAttention 3 behind them (not yet run on a GPU)"""

    name = "torch_flash_fa3"
    implementation = "FA3"
    module = "flash_attn_interface"
    distribution = "flash-attn-3"
    capabilities = (9,)


class TorchFlash4(_Switched):
    """torch's ops with FlashAttention 4 behind them (not yet run on a GPU)"""

    name = "torch_flash_fa4"
    implementation = "FA4"
    module = "flash_attn.cute.interface"
    distribution = "flash-attn-4"
    capabilities = (9, 10)
