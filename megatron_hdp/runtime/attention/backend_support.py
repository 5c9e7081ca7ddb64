# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Whether this machine and the rest of the launch line can have what --hdp-attention asks for."""

from __future__ import annotations

import argparse

import torch

from megatron_hdp import cpu
from megatron_hdp.runtime.attention.kernels import choice_refusal


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
    )
    return [refusal] if refusal else []


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
