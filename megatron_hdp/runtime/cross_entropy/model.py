# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Gives a GPTModel its loss through the model's own seam, `output_processor`.

Megatron hands the processor hidden states, output layer and labels, in place of its own logits and
loss (`GPTModel._postprocess`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_hdp.runtime.cross_entropy.chunked import Projection, linear_cross_entropy
from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy
from megatron_hdp.runtime.cross_entropy.statistics import LossTerms

LABELS_POSITION = 4
"""Of `labels` among GPTModel.forward's positional parameters."""


@dataclass(frozen=True)
class LossChoice:
    """Which loss a model is given."""

    mode: str = "megatron"
    """fused, chunked or megatron."""
    chunk: int = 1024
    """Tokens of a chunk, over the tensor-parallel group."""
    terms: LossTerms = field(default_factory=LossTerms)
    """In training; evaluation reports the plain cross-entropy."""


def bind_loss(model: GPTModel, choice: LossChoice) -> None:
    """Makes `model` compute its losses as chosen, whenever it is given labels.

    Raises:
        RuntimeError: the output layer is not one that the chunked loss knows.
    """
    if choice.mode == "megatron" or not model.post_process:
        return
    if choice.mode == "chunked":
        _let_losses_out(model.output_layer, choice)
    processor = {"fused": _fused_losses, "chunked": _chunked_losses}[choice.mode]

    def hand_in_processor(
        module: GPTModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        labels = args[LABELS_POSITION] if len(args) > LABELS_POSITION else kwargs.get("labels")
        if labels is None or kwargs.get("output_processor") is not None:
            return None
        terms = choice.terms if module.training else LossTerms()
        more = {"output_processor": processor, "output_processor_context": terms}
        return args, {**kwargs, **more}

    model.register_forward_pre_hook(hand_in_processor, with_kwargs=True)


def _fused_losses(
    *,
    hidden_states: torch.Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    runtime_gather_output: bool | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    context: LossTerms,
    **others: Any,
) -> torch.Tensor:
    """hidden_states [s, b, h] (or its shard), labels [b, s] -> losses [b, s]."""
    logits, _ = output_layer(
        hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
    )
    losses = fused_cross_entropy(scale_logits(logits), labels.t(), output_layer.tp_group, context)
    return losses.t().contiguous()


def _chunked_losses(
    *,
    hidden_states: torch.Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    context: LossTerms,
    **others: Any,
) -> torch.Tensor:
    """hidden_states [s, b, h] (or its shard), labels [b, s] -> losses [b, s]."""
    losses: torch.Tensor = output_layer(
        hidden_states, weight=output_weight, targets=labels.t(), terms=context
    )
    return losses.t().contiguous()


def _let_losses_out(layer: ColumnParallelLinear, choice: LossChoice) -> None:
    """Lets the output layer's forward return losses when it is given targets.

    The layer is still called as a module, so its hooks run: DDP's wait there for parameters that
    are gathered while the layers before compute.
    """
    if type(layer) is not ColumnParallelLinear or layer.bias is not None or layer.gather_output:
        raise RuntimeError(
            f"the chunked cross-entropy does not know this output layer "
            f"({type(layer).__name__}, bias {layer.bias is not None}, gathered "
            f"{layer.gather_output}): use --hdp-cross-entropy megatron."
        )
    logits_forward = layer.forward

    @functools.wraps(logits_forward)
    def forward(
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        targets: torch.Tensor | None = None,
        terms: LossTerms | None = None,
    ) -> Any:
        if targets is None:
            return logits_forward(input_, weight, runtime_gather_output)
        projection = Projection(
            group=layer.tp_group if layer.tp_group.size() > 1 else None,
            sequence_parallel=layer.sequence_parallel,
            chunk=choice.chunk,
            accumulate_in_main_grad=layer.gradient_accumulation_fusion,
        )
        losses = linear_cross_entropy(
            input_.reshape(-1, input_.shape[-1]),
            layer.weight if weight is None else weight,
            targets.reshape(-1),
            projection,
            terms,
        )
        return losses.view(targets.shape)

    layer.forward = forward
