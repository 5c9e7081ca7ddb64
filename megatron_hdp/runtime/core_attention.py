# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's core attention classes, running the ring that their micro-batch carries.

They take the class's place in the layer spec (`SelfAttentionSubmodules.core_attention`), so
parameters, checkpoints and everything else around attention stay what they are.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_hdp.runtime.attention import ring_attention, select_kernel
from megatron_hdp.runtime.attention.support import attention_window
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.session import current_session


def carried_state(packed_seq_params: PackedSeqParams | None) -> MicroBatchState | None:
    """The micro-batch state that travels with a forward (`packed_seq_params.hdp`), or None."""
    return getattr(packed_seq_params, "hdp", None)


def layer_window(config: Any, layer_number: int) -> int | None:
    """Tokens that a token of this layer (from 1) sees before itself; None: all.

    Args:
        config: a TransformerConfig, or parsed arguments: both have the same names.
    """
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return attention_window(config)
    return None


def mark_sinks(module: torch.nn.Module) -> None:
    """Learned sinks are a TP rank's own heads', and count as such.

    Megatron cuts `softmax_offset` over TP and saves it so, but does not mark it: its gradient norm
    then holds the first TP rank's sinks only.
    """
    sinks = getattr(module, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter) and not hasattr(sinks, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)


def run_ring(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: MicroBatchState,
) -> torch.Tensor:
    """HDP's own ring: query [t, n, d], key and value [t, g, d] -> [t, n * d].

    Args:
        module: the core attention; its `softmax_scale`, `layer_number`, `softmax_offset` (the
            sinks of --softmax-type, None without) and its config's windows are used.
    """
    config = module.config
    sink = getattr(module, "softmax_offset", None)
    kernel = select_kernel(
        current_session().options.attention,
        device=query.device,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        windowed=attention_window(config) is not None,
    )
    out = ring_attention(
        query,
        key,
        value,
        state,
        kernel=kernel,
        softmax_scale=module.softmax_scale,
        layer_number=module.layer_number,
        window=layer_window(config, module.layer_number),
        sink=None if sink is None else sink.reshape(-1),
    )
    return out.reshape(out.shape[0], -1)


class RingDotProductAttention(DotProductAttention):
    """Megatron's local core attention; with an HDP micro-batch it runs the micro-batch's ring.

    Without one (a script's own forward outside HDP's schedule) it is its base class.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        # The base class refuses a static CP size above 1, which HDP keeps for accounting only.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        mark_sinks(self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        state = carried_state(packed_seq_params)
        if state is not None:
            return run_ring(self, query, key, value, state)
        return super().forward(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )


@functools.cache
def ring_attention_class(core_attention: type) -> type:
    """The class that takes `core_attention`'s place in a layer spec.

    Raises:
        RuntimeError: HDP does not know how to run this core attention.
    """
    if issubclass(core_attention, RingDotProductAttention):
        return core_attention
    if core_attention is DotProductAttention:
        return RingDotProductAttention
    # Not at the top: it stands on this module.
    from megatron_hdp.runtime.te_core_attention import ring_te_class, te_core_attention

    te_class = te_core_attention()
    if te_class is not None and issubclass(core_attention, te_class):
        return ring_te_class(core_attention)
    raise RuntimeError(
        f"the layer spec's core attention {core_attention.__name__} is not supported with HDP: "
        f"use --transformer-impl local or transformer_engine with their standard attention."
    )
