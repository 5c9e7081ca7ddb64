# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Offload in Megatron's TransformerBlock, through forward hooks of PyTorch.

The context spans the block, since that is where activation checkpointing saves its inputs: with
full recompute those are what moves (`tensor_parallel.checkpoint`, Transformer Engine's), without it
everything that the layers save, with selective recompute the inputs of what is recomputed and the
rest. What recompute itself saves, in backward, is used at once and stays.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_hdp.runtime.core_attention import carried_state
from megatron_hdp.runtime.offload.engine import MicroBatchOffload, mark_layers
from megatron_hdp.runtime.session import current_session


def offload_block(block: TransformerBlock) -> None:
    """Makes a block's forward offload as its micro-batch says (`packed_seq_params.hdp`)."""
    hooks = _Hooks()
    block.register_forward_pre_hook(hooks.begin, with_kwargs=True)
    block.register_forward_hook(hooks.end, always_call=True)
    mark_layers(block.layers)


class _Hooks:
    """The context of the forward that runs; ratio 0, evaluation and other forwards have none."""

    def __init__(self) -> None:
        self._running: MicroBatchOffload | None = None

    def begin(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = carried_state(kwargs.get("packed_seq_params"))
        if state is None or not state.offload_ratio or not torch.is_grad_enabled():
            return
        engine = current_session().activation_offload(state.positions.device)
        engine.protect(block)
        self._running = engine.activations(state.offload_ratio, _held_anyway(block, kwargs))
        self._running.__enter__()

    def end(self, block: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)


def _held_anyway(block: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What stays on the device whatever the layers do with it.

    All layers share masks and RoPE's frequencies; the schedule holds the tensor that came from the
    previous pipeline stage, to read its gradient.
    """
    held = [] if block.pre_process else [block.input_tensor]
    for name, value in kwargs.items():
        if name != "hidden_states":
            held += value if isinstance(value, tuple | list) else [value]
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
