# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The interface of a block attention kernel under the ring, and the choice of one."""

from __future__ import annotations

import importlib
from typing import NamedTuple, Protocol, TypedDict

import torch

from megatron_hdp.runtime.micro_batch import VarlenArguments


class Kernel(Protocol):
    """Varlen attention of packed sequences, with LSE out and an external merged LSE in backward.

    q is [Tq, H, D], k and v are [Tk, G, D] with H a multiple of G; LSE is [H, Tq], natural log,
    float32 (float64 for float64 inputs). `causal` is only asked for with equal q and k boundaries.
    No sequence is empty on either side. Inputs are contiguous and left alone; what is returned is
    fresh memory, since the ring adds to it in place.
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
    note: str


class _Entry(NamedTuple):
    module: str
    attribute: str


_KERNELS = {
    "torch_flash": _Entry("torch_flash", "TorchFlash"),
    "cpu_flash": _Entry("cpu_flash", "CpuFlash"),
    "reference": _Entry("reference", "Reference"),
}
_PREFERRED = {"cuda": ("torch_flash", "reference"), "cpu": ("cpu_flash", "reference")}


def _load(name: str) -> type:
    entry = _KERNELS[name]
    module = importlib.import_module(f"megatron_hdp.runtime.attention.{entry.module}")
    kernel: type = getattr(module, entry.attribute)
    return kernel


def select_kernel(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel of that name, or for "auto" the best one that can do these inputs.

    Raises:
        ValueError: there is no such kernel, or it cannot do these inputs.
    """
    names = _PREFERRED[device.type] if name == "auto" else (name,)
    reasons = []
    for candidate in names:
        if candidate not in _KERNELS:
            raise ValueError(
                f"--hdp-attention {candidate} is not a kernel: use auto, {', '.join(_KERNELS)}."
            )
        kernel = _load(candidate)
        reason = kernel.refusal(device, dtype, head_dim)  # type: ignore[attr-defined]
        if reason is None:
            found: Kernel = kernel()
            return found
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"--hdp-attention {name} cannot run here ({'; '.join(reasons)}).")


def describe_kernels() -> list[KernelInfo]:
    """What doctor prints: every kernel, whether this machine can run it, and a note."""
    device = torch.device("cuda" if torch.version.cuda and _real_gpu() else "cpu")
    dtype = torch.bfloat16
    rows = []
    for name in _KERNELS:
        kernel = _load(name)
        reason = kernel.refusal(device, dtype, 128)  # type: ignore[attr-defined]
        note = (kernel.__doc__ or "").splitlines()[0]
        rows.append(KernelInfo(name=name, usable=reason is None, note=reason or note))
    return rows


def _real_gpu() -> bool:
    from megatron_hdp import cpu

    return torch.cuda.is_available() and not cpu.is_installed()
