# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The planner's view of the model, from Megatron's validated arguments."""

from __future__ import annotations

from argparse import Namespace

from megatron_hdp import cpu
from megatron_hdp.planning.activations import FULL, ModelShape
from megatron_hdp.planning.head_parallel import HeadShape
from megatron_hdp.planning.windows import NO_WINDOWS, Windows
from megatron_hdp.runtime.core_attention import layer_window


def windows(args: Namespace) -> Windows:
    """Sliding windows of --window-size and --window-attn-skip-freq."""
    found = [layer_window(args, number + 1) for number in range(args.num_layers)]
    windowed = [window for window in found if window is not None]
    return Windows(windowed[0], len(windowed) / len(found)) if windowed else NO_WINDOWS


def model_shape(args: Namespace) -> ModelShape:
    """What decides how many bytes a layer saves."""
    local, on_cpu = args.transformer_impl == "local", cpu.is_installed()
    rotary = args.position_embedding_type == "rope" and not args.apply_rope_fusion
    value_bytes = args.params_dtype.itemsize
    return ModelShape(
        num_layers=max(1, args.num_layers // args.pipeline_model_parallel_size),
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=_groups(args),
        kv_channels=args.kv_channels,
        rotary_channels=int(args.kv_channels * args.rotary_percent) if rotary else 0,
        gated_linear_unit=args.swiglu,
        fused_activation=args.swiglu and args.bias_swiglu_fusion,
        normalization=args.normalization,
        composite_rms_norm=local and on_cpu,
        qk_layernorm=args.qk_layernorm,
        value_bytes=value_bytes,
        statistic_bytes=value_bytes if on_cpu else 4,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        split_heads=split_heads(args) is not None,
        recompute=_recomputed(args),
        recompute_method=args.recompute_method or "uniform",
        recompute_num_layers=args.recompute_num_layers or 1,
    )


def head_shape(args: Namespace) -> HeadShape:
    """A TP rank's attention heads."""
    parallel = args.tensor_model_parallel_size
    return HeadShape(
        heads=args.num_attention_heads // parallel,
        groups=max(1, _groups(args) // parallel),
        head_dim=args.kv_channels,
        value_bytes=args.params_dtype.itemsize,
    )


def split_heads(args: Namespace) -> HeadShape | None:
    """The heads that rings may split; None: with `off`, and where no degree divides them."""
    if getattr(args, "hdp_head_parallel", "off") == "off":
        return None
    shape = head_shape(args)
    return shape if shape.degrees() else None


def _groups(args: Namespace) -> int:
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads)


def _recomputed(args: Namespace) -> frozenset[str]:
    if args.recompute_granularity == "full":
        return frozenset([FULL])
    if args.recompute_granularity == "selective":
        return frozenset(args.recompute_modules or ("core_attn",))  # as TransformerConfig does
    return frozenset()
