# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The interface of a block attention kernel under the ring, and the choice of one."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple, Protocol, TypedDict

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments


class Kernel(Protocol):
    """Varlen attention of packed sequences, with LSE out and an external merged LSE in backward.

    q is [Tq, H, D], k and v are [Tk, G, D] with H a multiple of G; LSE is [H, Tq], natural log,
    float32 (float64 for float64 inputs). `causal` is only asked for with equal q and k boundaries,
    and a window without it only with no more rows than keys. Every row sees a key, and no sequence
    is empty on either side. Inputs are contiguous and left alone; what is returned is fresh memory,
    since the ring adds to it in place.
    """

    name: str

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [Tq, H, D], LSE [H, Tq])."""
        ...

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
        """(dq, dk, dv) of this block, given the merged out and LSE over all blocks."""
        ...


class KernelInfo(TypedDict):
    """One row of doctor's table."""

    name: str
    usable: bool
    version: str | None
    """Of the package behind it; for torch's own, which implementation is active."""
    note: str


class _Entry(NamedTuple):
    module: str
    attribute: str


TRANSFORMER_ENGINE = "transformer_engine"
"""Not a kernel under the ring: Transformer Engine runs a ring of its own over a process group."""

_KERNELS = {
    "torch_flash": _Entry("torch_flash", "TorchFlash"),
    "torch_flash_fa3": _Entry("torch_flash", "TorchFlash3"),
    "torch_flash_fa4": _Entry("torch_flash", "TorchFlash4"),
    "flash_attn_2": _Entry("flash_attn", "FlashAttn2"),
    "flash_attn_3": _Entry("flash_attn", "FlashAttn3"),
    "cpu_flash": _Entry("cpu_flash", "CpuFlash"),
    "reference": _Entry("reference", "Reference"),
}
_ALIASES = {"flash_attn": ("flash_attn_3", "flash_attn_2")}
CHOICES = ("auto", *_ALIASES, *_KERNELS, TRANSFORMER_ENGINE)
"""What --hdp-attention takes."""


def _load(name: str) -> Any:
    if name == TRANSFORMER_ENGINE:
        return importlib.import_module("megatron_hdp.runtime.attention.transformer_engine")
    entry = _KERNELS[name]
    module = importlib.import_module(f"megatron_hdp.runtime.attention.{entry.module}")
    return getattr(module, entry.attribute)


def _candidates(name: str, device: torch.device) -> tuple[str, ...]:
    if name != "auto":
        return _ALIASES.get(name, (name,))
    if device.type == "cpu":
        return ("cpu_flash", "reference")
    # FlashAttention 3 exists for Hopper alone and is the fastest there; torch's own is
    # FlashAttention 2, so the flash-attn package's 2 is only for builds of torch without it. An
    # implementation that a script switched on in torch is a wish of its own.
    from megatron_hdp.runtime.attention.torch_flash import active_implementation

    if active_implementation() is not None:
        return ("torch_flash", "reference")
    return ("flash_attn_3", "torch_flash", "flash_attn_2", "reference")


@functools.lru_cache
def select_kernel(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool = False
) -> Kernel:
    """The kernel of that name, or for "auto" the best one that can do these inputs.

    Args:
        windowed: a layer of the model has a sliding window.

    Raises:
        ValueError: there is no such kernel, or it cannot do these inputs.
    """
    if name not in CHOICES:
        raise ValueError(f"--hdp-attention {name} is not known: use one of {', '.join(CHOICES)}.")
    if name == TRANSFORMER_ENGINE:
        raise ValueError(
            f"--hdp-attention {name} runs in Transformer Engine's core attention, which the "
            f"model's layer spec does not have: use --hdp-attention auto."
        )
    reasons = []
    for candidate in _candidates(name, device):
        kernel = _load(candidate)
        reason = kernel.refusal(device, dtype, head_dim)
        if reason is None and windowed:
            reason = kernel.window_refusal()
        if reason is None:
            found: Kernel = kernel()
            return found
        reasons.append(reason if candidate == name else f"{candidate}: {reason}")
    raise ValueError(
        f"--hdp-attention {name} cannot run here ({'; '.join(reasons)}): use auto, or see "
        f"`python -m megatron_hdp doctor`."
    )


def choice_refusal(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool = False
) -> str | None:
    """One sentence when --hdp-attention `name` cannot be had here, else None."""
    if name == TRANSFORMER_ENGINE:
        reason = _load(name).refusal(device, dtype, head_dim)
        return reason and f"--hdp-attention {name} cannot run here ({reason}): use auto."
    try:
        select_kernel(name, device=device, dtype=dtype, head_dim=head_dim, windowed=windowed)
    except ValueError as error:
        return str(error)
    return None


def describe_choice(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool = False
) -> str:
    """What --hdp-attention `name` comes down to, with its version, for the line at the start."""
    if name != TRANSFORMER_ENGINE:
        name = select_kernel(
            name, device=device, dtype=dtype, head_dim=head_dim, windowed=windowed
        ).name
    version = _load(name).version()
    return f"{name} ({version})" if version else name


def describe_kernels() -> list[KernelInfo]:
    """What doctor prints: every backend, whether this machine can run it, its version, a note."""
    device = _device()
    rows = []
    for name in (*_KERNELS, TRANSFORMER_ENGINE):
        kernel = _load(name)
        reason = kernel.refusal(device, torch.bfloat16, 128)
        note = (kernel.__doc__ or "").splitlines()[0]
        rows.append(
            KernelInfo(
                name=name, usable=reason is None, version=kernel.version(), note=reason or note
            )
        )
    return rows


def _device() -> torch.device:
    """Where a training run on this machine would compute."""
    from megatron_hdp import cpu

    real_gpu = torch.cuda.is_available() and not cpu.is_installed()
    return torch.device("cuda" if torch.version.cuda and real_gpu else "cpu")
