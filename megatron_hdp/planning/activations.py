# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a transformer layer saves for backward: Act(s) of Eq. 3, by the rule that offload counts.

One term per tensor that autograd holds, each storage once; parameters, RoPE's shared frequencies
and what recompute makes anew are not in it. Megatron's local layers are compared with the engine's
counts in the tests, byte for byte; Transformer Engine's are from its source.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = "full"
"""In `ModelShape.recompute`: whole layers, `recompute_method` says which."""
_LSE_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """What decides the saved bytes. Field names are Megatron's where it has them."""

    num_layers: int
    """Of one pipeline stage."""
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_channels: int = 0
    """Channels that RoPE turns without fusion (it saves sine and cosine then); 0 otherwise."""
    gated_linear_unit: bool = False
    fused_activation: bool = False
    """Bias and activation in one kernel, which keeps their input alone."""
    normalization: str = "LayerNorm"
    composite_rms_norm: bool = False
    """RMSNorm made of single operations, as on a CPU: it also saves the normalised input."""
    qk_layernorm: bool = False
    value_bytes: int = 2
    statistic_bytes: int = 4
    """Of a norm's mean and reciprocal deviation."""
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    split_heads: bool = False
    """Rings may split heads, whose share of the output is then saved beside the output."""
    recompute: frozenset[str] = frozenset()
    """Modules of selective recompute, or FULL alone."""
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1


def saved_bytes(shape: ModelShape) -> float:
    """Bytes per token and layer on one rank, the mean over the stage's layers."""
    whole = layer_bytes(shape)
    if FULL not in shape.recompute:
        return whole
    layers, count = shape.num_layers, min(shape.recompute_num_layers, shape.num_layers)
    if shape.recompute_method == "block":
        return (count * checkpoint_bytes(shape) + (layers - count) * whole) / layers
    return -(-layers // count) * checkpoint_bytes(shape) / layers


def recomputed_bytes(shape: ModelShape) -> float:
    """Bytes per token that full recompute brings back at a time: a stretch of layers; else 0."""
    if FULL not in shape.recompute:
        return 0.0
    layers = 1 if shape.recompute_method == "block" else shape.recompute_num_layers
    return layer_bytes(shape) * min(layers, shape.num_layers)


def attention_recomputed(shape: ModelShape) -> float:
    """Share of the stage's layers whose core attention runs again in backward."""
    if FULL in shape.recompute and shape.recompute_method == "block":
        return min(shape.recompute_num_layers, shape.num_layers) / shape.num_layers
    return float(bool(shape.recompute & {FULL, "core_attn"}))


def checkpoint_bytes(shape: ModelShape) -> float:
    """Bytes per token of a fully recomputed stretch of layers: its input."""
    return _hidden(shape)


def layer_bytes(shape: ModelShape) -> float:
    """Bytes per token of a layer that is not fully recomputed."""
    return _norms(shape) + _attention(shape) + _mlp(shape)


def _hidden(shape: ModelShape) -> float:
    """A hidden state, as it lies between layers."""
    cut = shape.tensor_model_parallel_size if shape.sequence_parallel else 1
    return shape.value_bytes * shape.hidden_size / cut


def _norm(shape: ModelShape, values: float, rows: float) -> float:
    """What a norm over `values` bytes in `rows` rows saves beside its output."""
    rms = shape.normalization == "RMSNorm"
    composite = values if rms and shape.composite_rms_norm else 0.0
    return values + composite + (1 if rms else 2) * rows * shape.statistic_bytes


def _norms(shape: ModelShape) -> float:
    """The two norms before attention and MLP, with their outputs, which the linear layers save."""
    hidden = _hidden(shape)
    rows = hidden / (shape.value_bytes * shape.hidden_size)
    # CheckpointWithoutOutput keeps the input, and fills the output in again.
    each = hidden if "layernorm" in shape.recompute else _norm(shape, hidden, rows) + hidden
    return 2 * each


def _attention(shape: ModelShape) -> float:
    """q, k, v, the output (shared with the projection's input), LSE; RoPE; norms of q and k."""
    parallel = shape.tensor_model_parallel_size
    heads = shape.num_attention_heads / parallel
    groups = max(1.0, shape.num_query_groups / parallel)
    width = shape.kv_channels * shape.value_bytes
    saved = (2 * heads + 2 * groups) * width
    if "core_attn" not in shape.recompute:
        saved += heads * _LSE_BYTES + (heads * width if shape.split_heads else 0)
    saved += 4 * shape.rotary_channels * shape.value_bytes
    if shape.qk_layernorm:
        saved += _norm(shape, heads * width, heads) + _norm(shape, groups * width, groups)
    return saved


def _mlp(shape: ModelShape) -> float:
    """Input of the activation, what it keeps inside, and its output."""
    if "mlp" in shape.recompute:
        return 0.0
    width = shape.ffn_hidden_size * shape.value_bytes / shape.tensor_model_parallel_size
    if not shape.gated_linear_unit:
        return 2 * width
    return (3 if shape.fused_activation else 4) * width
