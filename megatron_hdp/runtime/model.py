# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Makes a GPTModel run HDP micro-batches, through the model's own seams.

Attention enters by the layer spec, RoPE by `rotary_pos_emb`, the loss by `output_processor`, the
micro-batch's state by a forward pre-hook that hands PackedSeqParams in, activation offload by
forward hooks of the decoder and its layers, router losses by methods of each router. No class of
Megatron is changed.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.runtime.attention.support import check_attention_config
from megatron_hdp.runtime.context import current_micro_batch
from megatron_hdp.runtime.core_attention import carried_state, ring_attention_class
from megatron_hdp.runtime.cross_entropy.model import LossChoice, bind_loss
from megatron_hdp.runtime.moe.router import bind_routers
from megatron_hdp.runtime.offload.block import offload_block
from megatron_hdp.runtime.rope import PositionRotaryEmbedding

Spec = Any
"""ModuleSpec or TransformerBlockSubmodules."""


class OneRankGroup:
    """Stands in for a context-parallel process group of one rank.

    Megatron's RoPE asks a group for size and rank only; positions are per token here, so nothing is
    cut along the static context-parallel group.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def check_config(config: TransformerConfig) -> None:
    """Raises RuntimeError when the built config would give wrong gradients or shapes."""
    if not config.calculate_per_token_loss:
        raise RuntimeError(
            "the model's config has calculate_per_token_loss off, with which HDP's gradients would "
            "be wrong: build it from the parsed arguments, or set it to True."
        )
    for refusal in check_attention_config(config):
        raise RuntimeError(f"megatron_hdp: {refusal}")


def ring_spec(spec: Spec) -> Spec:
    """A copy of a layer spec, or of a block's layer specs, whose core attention runs rings."""
    if isinstance(spec, TransformerBlockSubmodules):
        return replace(spec, layer_specs=[_ring_layer(layer) for layer in spec.layer_specs or []])
    if isinstance(spec.submodules, TransformerBlockSubmodules):
        return replace(spec, submodules=ring_spec(spec.submodules))
    return _ring_layer(spec)


def _ring_layer(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    core = attention.submodules.core_attention
    if isinstance(core, ModuleSpec):
        ring_core: Any = replace(core, module=ring_attention_class(core.module))
    else:
        ring_core = ring_attention_class(core)
    inner = replace(attention.submodules, core_attention=ring_core)
    outer = replace(layer.submodules, self_attention=replace(attention, submodules=inner))
    return replace(layer, submodules=outer)


def bind(model: GPTModel, loss: LossChoice) -> None:
    """Prepares a freshly built GPTModel, before Float16Module and DDP wrap it."""
    check_config(model.config)
    # Shapes differ from micro-batch to micro-batch; there is no argument for it (validate_args).
    model.config.variable_seq_lengths = True
    if model.position_embedding_type == "rope":
        model.rotary_pos_emb = PositionRotaryEmbedding(model.rotary_pos_emb)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.pg_collection = copy.copy(module.pg_collection)
            module.pg_collection.cp = OneRankGroup()
    bind_routers(model)
    offload_block(model.decoder)
    bind_loss(model, loss)
    model.register_forward_pre_hook(_hand_in_state, with_kwargs=True)


def _hand_in_state(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Adds the running micro-batch's PackedSeqParams to the model's keyword arguments."""
    micro_batch = current_micro_batch()
    if micro_batch is None or carried_state(kwargs.get("packed_seq_params")) is not None:
        return None
    names = ("input_ids", "position_ids", "attention_mask", "decoder_input", "labels")
    named = dict(zip(names, args, strict=False))
    named.update(kwargs)
    named["packed_seq_params"] = packed_seq_params(micro_batch.state)
    named["attention_mask"] = None
    return (), named


def packed_seq_params(state: Any) -> PackedSeqParams:
    """PackedSeqParams that carry `state`.

    The boundaries that Megatron sees are [0, T]: its packed RoPE then takes one slice of the
    per-token frequencies. The real ones are in the state, which travels as a plain attribute since
    Megatron forwards dataclass fields to Transformer Engine.
    """
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=state.whole_cu_seqlens,
        cu_seqlens_kv=state.whole_cu_seqlens,
        max_seqlen_q=state.layout.num_tokens,
        max_seqlen_kv=state.layout.num_tokens,
    )
    params.hdp = state  # type: ignore[attr-defined]
    return params
