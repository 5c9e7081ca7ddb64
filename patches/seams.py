# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's official seams that HDP uses instead of patches, each with a check of its own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seam:
    """One attribute of Megatron that HDP fills in, without replacing it."""

    target: str
    """`module:attribute` or `module:Class.attribute`."""
    use: str
    """What HDP does there."""
    expected: str
    """What `look` must return."""
    look: Callable[[Any], str]
    """Describes the located object; compared with `expected`."""

    def locate(self) -> Any:
        module_name, path = self.target.split(":")
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        return found

    def found(self) -> str:
        """What stands there now; a sentence when it is missing."""
        try:
            return self.look(self.locate())
        except (ImportError, AttributeError) as error:
            return f"missing: {error}"


def _field(name: str) -> Callable[[Any], str]:
    def look(cls: Any) -> str:
        return name if name in {f.name for f in dataclasses.fields(cls)} else f"no field {name}"

    return look


def _parameters(found: Any) -> str:
    return ", ".join(inspect.signature(found).parameters)


def _loss_parameters(found: Any) -> str:
    names = list(inspect.signature(found).parameters)
    labels = f"labels at {names.index('labels')}" if "labels" in names else "no labels"
    return ", ".join([labels, *(name for name in names if name.startswith("output_processor"))])


SEAMS = (
    Seam(
        "megatron.core.transformer.attention:SelfAttentionSubmodules",
        "core_attention of a copy of the layer spec becomes the ring class",
        "core_attention",
        _field("core_attention"),
    ),
    Seam(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:"
        "RotaryEmbedding.get_rotary_seq_len",
        "rotary_pos_emb of a built GPTModel becomes RoPE by explicit positions",
        "self, inference_context, transformer, transformer_input, transformer_config, "
        "packed_seq_params, inference_params",
        _parameters,
    ),
    Seam(
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "output_processor computes the loss, with --hdp-cross-entropy fused or chunked",
        "labels at 5, output_processor, output_processor_context",
        _loss_parameters,
    ),
    Seam(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
        "forward of the model's output layer returns losses when it is given targets (chunked)",
        "self, input_, weight, runtime_gather_output",
        _parameters,
    ),
    Seam(
        "megatron.core.packed_seq_params:PackedSeqParams",
        "carries the micro-batch's state as a plain attribute to attention and RoPE",
        "cu_seqlens_q",
        _field("cu_seqlens_q"),
    ),
    Seam(
        "megatron.core.transformer.transformer_block:TransformerBlock.forward",
        "forward hooks of a built decoder and its layers span what activation offload moves",
        "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, "
        "rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin, attention_bias, inference_context, "
        "packed_seq_params, sequence_len_offset, padding_mask, extract_layer_indices, "
        "inference_params, dynamic_inference_decode_only",
        _parameters,
    ),
    Seam(
        "megatron.core.model_parallel_config:ModelParallelConfig",
        "variable_seq_lengths is set, so that pipeline stages take any shape",
        "variable_seq_lengths",
        _field("variable_seq_lengths"),
    ),
    Seam(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        "a subclass, passed as p2p_communicator, knows shapes from the plan",
        "self, tensor_send_next, tensor_send_prev, recv_prev, recv_next",
        _parameters,
    ),
    Seam(
        "megatron.training.training:build_train_valid_test_data_loaders",
        "dataloader_type external passes HDP's iterators through",
        "build_train_valid_test_datasets_provider",
        _parameters,
    ),
    Seam(
        "megatron.training.training:update_seqlen_stats_from_cu_seqlens",
        "counts real tokens and squared lengths for Megatron's FLOPs log",
        "cu_seqlens",
        _parameters,
    ),
    Seam(
        "megatron.core.datasets.blended_megatron_dataset_builder:"
        "BlendedMegatronDatasetBuilder.__init__",
        "is_built_on_rank is True on every rank while a script's dataset provider runs",
        "self, cls, sizes, is_built_on_rank, config",
        _parameters,
    ),
)
