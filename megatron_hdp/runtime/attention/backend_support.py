# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Whether this machine and the rest of the launch line can have what --hdp-attention asks for."""

from __future__ import annotations

import argparse

import torch

from megatron_hdp import cpu
from megatron_hdp.runtime.attention.kernels import TRANSFORMER_ENGINE, choice_refusal
from megatron_hdp.runtime.attention.support import HEAD_PARALLEL, attention_window


def attention_refusals(args: argparse.Namespace) -> list[str]:
    """One sentence for each thing that does not go with --hdp-attention.

    Args:
        args: parsed arguments, before Megatron's own validation.
    """
    name = getattr(args, "hdp_attention", "auto")
    refusal = choice_refusal(
        name,
        device=torch.device("cpu" if cpu.is_installed() else "cuda"),
        dtype=_dtype(args),
        head_dim=_head_dim(args),
        windowed=attention_window(args) is not None,
    )
    if refusal:
        return [refusal]
    found = head_parallel_refusals(args)
    return found + (transformer_engine_refusals(args) if name == TRANSFORMER_ENGINE else [])


def head_parallel_refusals(args: argparse.Namespace) -> list[str]:
    """One sentence for each thing that does not go with --hdp-head-parallel."""
    choice = getattr(args, "hdp_head_parallel", "off")
    if choice == "off":
        return []
    if choice not in HEAD_PARALLEL:
        return [f"--hdp-head-parallel {choice}: use one of {', '.join(HEAD_PARALLEL)}."]
    if args.hdp_attention == TRANSFORMER_ENGINE:
        return [
            f"--hdp-head-parallel {choice} does not go with --hdp-attention transformer_engine, "
            f"which runs rings of its own: leave it out, or use --hdp-attention auto."
        ]
    if attention_window(args) is not None:
        return [
            f"--hdp-head-parallel {choice} does not go with --window-size, whose layers send only "
            f"the rows that are seen: leave it out."
        ]
    return []


def transformer_engine_refusals(args: argparse.Namespace) -> list[str]:
    """What must be true of the launch line for --hdp-attention transformer_engine."""
    found = []
    if args.transformer_impl != TRANSFORMER_ENGINE:
        found.append(
            f"--transformer-impl {args.transformer_impl} has no Transformer Engine attention, "
            f"which --hdp-attention transformer_engine asks for: use --transformer-impl "
            f"transformer_engine, or --hdp-attention auto."
        )
    kinds = [kind for kind in args.cp_comm_type or () if kind != "p2p"]
    if kinds:
        found.append(
            f"--cp-comm-type {kinds[0]}: rings of any size and head count only go with p2p: pass "
            f"--cp-comm-type p2p, or --hdp-attention auto."
        )
    # Its ring over p2p knows neither (attn_forward_func_with_cp).
    for flag, value in (
        ("--window-size", getattr(args, "window_size", None)),
        ("--softmax-type", getattr(args, "softmax_type", None)),
    ):
        if value not in (None, "vanilla"):
            found.append(
                f"{flag} {value} does not go with --hdp-attention transformer_engine, whose ring "
                f"does not know it: use --hdp-attention auto."
            )
    if args.hdp_te_groups < 1:
        found.append(f"--hdp-te-groups {args.hdp_te_groups}: give 1 or more process groups.")
    return found


def _head_dim(args: argparse.Namespace) -> int:
    """Megatron's default where the line does not say; it asks for what is missing later itself."""
    if getattr(args, "kv_channels", None):
        return int(args.kv_channels)
    hidden, heads = getattr(args, "hidden_size", None), getattr(args, "num_attention_heads", None)
    return hidden // heads if hidden and heads else 128


def _dtype(args: argparse.Namespace) -> torch.dtype:
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else torch.float32
