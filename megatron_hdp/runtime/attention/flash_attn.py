# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The flash-attn package, 2 and 3, called below its autograd. No GPU has run this yet.

Source: `_flash_attn_varlen_forward` and `_backward` of flash_attn.flash_attn_interface (2.7 and
later), `_flash_attn_forward` and `_backward` of flash_attn_interface (the hopper folder, 3.0).
Both give LSE as [H, Tq] and write dq, dk, dv in place; rows that no sequence covers, and rows
without a key (LSE +inf), do not occur: sequences cover all rows, and none is empty.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_hdp.runtime.attention.torch_flash import (
    flash_refusal,
    import_refusal,
    installed_version,
    no_decode_path,
    window_keywords,
)
from megatron_hdp.runtime.micro_batch import VarlenArguments

Function = Callable[..., Any]
MODULE_2 = "flash_attn.flash_attn_interface"
MODULES_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Where its setup installs it, and where Transformer Engine asked users to copy it to."""

_VARLEN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale"
FORWARD_2 = f"q k v {_VARLEN} causal dropout_p window_size_left window_size_right".split()
FORWARD_3 = f"q k v {_VARLEN} causal".split()
BACKWARD_3 = f"dout q k v out softmax_lse dq dk dv {_VARLEN} deterministic".split()
BACKWARD_2 = f"{' '.join(BACKWARD_3)} causal dropout_p window_size_left window_size_right".split()
"""Parameters that are passed, by name; a package that lacks one is refused."""


class FlashAttn2:
    """the flash-attn package, version 2 (not yet run on a GPU)"""

    name = "flash_attn_2"

    def __init__(self) -> None:
        self._forward, self._backward = _functions(MODULE_2, "_flash_attn_varlen")

    @staticmethod
    def version() -> str | None:
        return installed_version("flash-attn")

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return flash_refusal(device, dtype, head_dim) or _package_refusal(
            MODULE_2, "_flash_attn_varlen", "flash-attn 2.7 or newer", FORWARD_2, BACKWARD_2,
        )  # fmt: skip

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
        out, lse, *_ = self._forward(
            q=q, k=k, v=v, cu_seqlens_q=arguments.cu_q, cu_seqlens_k=arguments.cu_k,
            max_seqlen_q=no_decode_path(arguments.max_q), max_seqlen_k=arguments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=causal,
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._backward(
            dout=grad_out.contiguous(), q=q, k=k, v=v, out=out.to(q.dtype),
            softmax_lse=lse.contiguous(), dq=dq, dk=dk, dv=dv,
            cu_seqlens_q=arguments.cu_q, cu_seqlens_k=arguments.cu_k,
            max_seqlen_q=arguments.max_q, max_seqlen_k=arguments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=causal,
            softcap=0.0, alibi_slopes=None, **window_keywords(arguments, causal),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn3:
    """FlashAttention 3, on Hopper GPUs (not yet run on a GPU)"""

    name = "flash_attn_3"

    def __init__(self) -> None:
        forward, backward = _functions(_module_3(), "_flash_attn")
        # Builds differ in which optional tensors have a default, and in this one name.
        self._forward = functools.partial(forward, **_nones(forward, FORWARD_3))
        self._causal = "is_causal" if "is_causal" in _parameters(backward) else "causal"
        self._backward = functools.partial(
            backward, **_nones(backward, [*BACKWARD_3, self._causal])
        )

    @staticmethod
    def version() -> str | None:
        return installed_version("flash-attn-3")

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        reason = flash_refusal(device, dtype, head_dim)
        if reason is not None:
            return reason
        major = torch.cuda.get_device_capability(device)[0]
        if major != 9:
            return f"it needs a GPU of compute capability 9.x, not {major}.x"
        if head_dim > 192 and torch.are_deterministic_algorithms_enabled():
            return f"its backward is not deterministic for head dims above 192 ({head_dim})"
        return _package_refusal(
            _module_3(), "_flash_attn", "FlashAttention 3.0", FORWARD_3, BACKWARD_3
        )

    @staticmethod
    def window_refusal() -> str | None:
        functions = _functions(_module_3(), "_flash_attn")
        if all({"window_size", "window_size_left"} & set(_parameters(f)) for f in functions):
            return None
        return "its functions take no window_size: install FlashAttention 3.0"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q=q, k=k, v=v, cu_seqlens_q=arguments.cu_q, cu_seqlens_k=arguments.cu_k,
            max_seqlen_q=arguments.max_q, max_seqlen_k=arguments.max_k,
            softmax_scale=scale, causal=causal, **_window_3(self._forward, arguments, causal),
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._backward(
            dout=grad_out.contiguous(), q=q, k=k, v=v, out=out.to(q.dtype),
            softmax_lse=lse.contiguous(), dq=dq, dk=dk, dv=dv,
            cu_seqlens_q=arguments.cu_q, cu_seqlens_k=arguments.cu_k,
            max_seqlen_q=arguments.max_q, max_seqlen_k=arguments.max_k, softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(), **{self._causal: causal},
            **_window_3(self._backward, arguments, causal),
        )  # fmt: skip
        return dq, dk, dv


def _window_3(
    function: functools.partial[Any], arguments: VarlenArguments, causal: bool
) -> dict[str, Any]:
    """The window under the name that this build has for it; nothing without one."""
    if arguments.window is None:
        return {}
    sides = window_keywords(arguments, causal)
    names = _parameters(function.func)
    return sides if "window_size_left" in names else {"window_size": tuple(sides.values())}


def _module_3() -> str:
    """The first that imports, else the first."""
    found = (module for module in MODULES_3 if import_refusal(module, "") is None)
    return next(found, MODULES_3[0])


def _functions(module: str, prefix: str) -> tuple[Function, Function]:
    found = importlib.import_module(module)
    return getattr(found, f"{prefix}_forward"), getattr(found, f"{prefix}_backward")


def _package_refusal(
    module: str, prefix: str, wanted: str, forward: Sequence[str], backward: Sequence[str]
) -> str | None:
    reason = import_refusal(module, wanted)
    if reason is not None:
        return reason
    try:
        functions = _functions(module, prefix)
    except AttributeError as error:
        return f"{error}: install {wanted}"
    for function, names in zip(functions, (forward, backward), strict=True):
        missing = [name for name in names if name not in _parameters(function)]
        if missing:
            return f"its {prefix} functions lack {', '.join(missing)}: install {wanted}"
    return None


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    # A torch.library.custom_op hides the signature of the function that it keeps.
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _nones(function: Function, passed: Sequence[str]) -> dict[str, None]:
    """None for every parameter that has no default and is not passed."""
    return {
        name: None
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty and name not in passed
    }
