# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's norms under sequence parallelism, for machines without Transformer Engine and Apex."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

_stock_new = WrappedTorchNorm.__new__


def new_wrapped_norm(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
) -> torch.nn.Module:
    """What `WrappedTorchNorm(...)` makes, sequence parallelism included.

    Under sequence parallelism a rank sees a part of the tokens, so that its norm gradients are
    partial sums; Megatron adds up those of parameters that carry `sequence_parallel`. Without the
    mark training goes on with wrong gradients (megatron.core.distributed.finalize_model_grads,
    _allreduce_non_tensor_model_parallel_grads).
    """
    alone = copy.copy(config)
    alone.sequence_parallel = False
    norm: torch.nn.Module = _stock_new(cls, alone, hidden_size, eps, **unused)  # type: ignore
    _mark(norm, config.sequence_parallel)
    return norm


def _mark(norm: torch.nn.Module, sequence_parallel: bool) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def sequence_parallel_norm(
    *, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
) -> torch.nn.Module:
    """A LayerNorm or RMSNorm by `config.normalization`, for a layer spec.

    Args:
        hidden_size: size of the last dimension of its input, [s, b, h] or [t, 1, h].
    """
    return new_wrapped_norm(WrappedTorchNorm, config, hidden_size, eps)
