# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Makes Megatron train in float64 on a CPU, for comparisons to 1e-12. Tests only.

Megatron casts to float32 in its loss and tells optimizer dtypes by a fixed list of names; each
stand-in here lets float64 through one such place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> None:
    """For the life of the process; call after `megatron_hdp.cpu.install()`.

    * `Tensor.float` leaves float64 alone (vocab_parallel_cross_entropy and loss functions call it).
    * `torch.softmax` does not cast float64 down (MoE routers ask it for float32).
    * `Tensor.type` reports float64 as FloatTensor (DistributedOptimizer accepts three names only).
    * models are built with float64 parameters, RoPE frequencies included.
    """
    _keep_double_in_float()
    _keep_double_in_softmax()
    _report_double_as_float()
    _build_models_in_double()


def _keep_double_in_float() -> None:
    original = torch.Tensor.float

    def to_float(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else original(self, *args, **kwargs)

    torch.Tensor.float = to_float  # type: ignore[assignment,method-assign]


def _keep_double_in_softmax() -> None:
    original = torch.softmax

    def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return original(input, dim, dtype=None if input.dtype == torch.float64 else dtype)

    torch.softmax = softmax  # type: ignore[assignment]


def _report_double_as_float() -> None:
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("Double", "Float") if isinstance(result, str) else result

    torch.Tensor.type = tensor_type  # type: ignore[assignment,method-assign]


def _build_models_in_double() -> None:
    from megatron.training.models.gpt import GPTModelBuilder

    original = GPTModelBuilder.build_model

    @functools.wraps(original)
    def build_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self._model_config.transformer
        config.params_dtype = config.pipeline_dtype = torch.float64
        model = original(self, *args, **kwargs).double()
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq = module.inv_freq.double()
        return model

    GPTModelBuilder.build_model = build_model
