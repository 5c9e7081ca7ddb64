# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's wrapper of torch norms refuses sequence parallelism."""

from __future__ import annotations

from megatron_hdp.cpu.faults.fault import Fault


def _needed() -> bool:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_hdp.cpu import norm

    return WrappedTorchNorm.__new__ is not norm.new_wrapped_norm


def _handle() -> None:
    # In place: TransformerBlock takes its final norm by the class's name, not from a layer spec.
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_hdp.cpu import norm

    WrappedTorchNorm.__new__ = norm.new_wrapped_norm  # type: ignore[method-assign,assignment]


FAULT = Fault(
    symbol="megatron.core.transformer.torch_norm:WrappedTorchNorm",
    seen="AssertionError: sequence parallel not supported by torch LayerNorm",
    where="without TE and Apex, GPUs too",
    needed=_needed,
    handle=_handle,
)
