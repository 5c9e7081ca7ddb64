# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's attention settings the ring can honour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

HEAD_PARALLEL = ("off", "auto")
"""What --hdp-head-parallel takes."""


class _Setting(NamedTuple):
    """One field of TransformerConfig that the ring would otherwise ignore in silence."""

    attribute: str
    flag: str
    asked_for: Callable[[Any], bool]
    way_out: str


SETTINGS = (
    _Setting("multi_latent_attention", "--multi-latent-attention", bool, "leave it out"),
    _Setting("attention_dropout", "--attention-dropout", bool, "pass --attention-dropout 0.0"),
    _Setting(
        "apply_query_key_layer_scaling",
        "--apply-query-key-layer-scaling",
        bool,
        "leave it out; scores are kept in fp32 already",
    ),
    _Setting("qk_clip", "--qk-clip", bool, "leave it out; the kernels report no largest logit"),
    _Setting(
        "log_max_attention_logit",
        "--log-max-attention-logit",
        bool,
        "leave it out; the kernels report no largest logit",
    ),
    _Setting(
        "fp8_dot_product_attention",
        "--fp8-dot-product-attention",
        bool,
        "leave it out; the kernels take bf16 and fp16",
    ),
    _Setting(
        "fp8_multi_head_attention",
        "--fp8-multi-head-attention",
        bool,
        "leave it out; the kernels take bf16 and fp16",
    ),
    _Setting("use_kitchen_attention", "--use-kitchen-attention", bool, "leave it out"),
    _Setting(
        "batch_invariant_mode",
        "--batch-invariant-mode",
        bool,
        "leave it out; a ring's size decides the order of its sums",
    ),
    _Setting(
        "experimental_attention_variant",
        "--experimental-attention-variant",
        bool,
        "leave it out",
    ),
    _Setting("linear_attention_freq", "--linear-attention-freq", bool, "leave it out"),
)


_KERNEL_CHOICES = (
    ("attention_backend", "--attention-backend", "auto"),
    ("flash_attention_version", "--flash-attention-version", None),
    ("cp_comm_type", "--cp-comm-type", "p2p"),
)


def replaced_choices(args: Any) -> str | None:
    """One sentence about flags that choose kernels or transfers which HDP's ring replaces.

    They change no result, so a launch line may keep them.
    """
    found = []
    for attribute, flag, default in _KERNEL_CHOICES:
        value = getattr(args, attribute, None)
        values = value if isinstance(value, list) else [value]
        names = [str(getattr(one, "name", one)) for one in values if one is not None]
        if any(name != default for name in names):
            found.append(f"{flag} {' '.join(names)}")
    if not found:
        return None
    return f"not read, since HDP's ring runs attention (--hdp-attention): {', '.join(found)}"


def attention_window(config: Any) -> int | None:
    """Tokens that a token sees before itself in windowed layers; None without a window.

    Args:
        config: a TransformerConfig, or parsed arguments, that `check_attention_config` passed.
    """
    window = getattr(config, "window_size", None)
    return None if not window or window[0] < 0 else int(window[0])


def _window_refusals(config: Any) -> list[str]:
    """Attention is causal, so only the left side of --window-size may be closed."""
    window = getattr(config, "window_size", None)
    # An open left side means all tokens: (-1, -1), as the kernels write it, or (-1, 0).
    if not window or (len(window) == 2 and (window[1] == 0 or tuple(window) == (-1, -1))):
        return []
    left = window[0] if window[0] >= 0 else 128
    return [
        f"--window-size {','.join(map(str, window))}: attention is causal, so a window has a left "
        f"side only: pass --window-size {left},0 for {left} tokens before each, or leave it out."
    ]


def check_attention_config(config: Any) -> list[str]:
    """One sentence for each setting that ring attention does not support yet.

    Args:
        config: a TransformerConfig, or parsed arguments: both have the same names.
    """
    found = []
    for setting in SETTINGS:
        value = getattr(config, setting.attribute, None)
        if setting.asked_for(value):
            shown = "" if value is True else f" {value}"
            found.append(
                f"{setting.flag}{shown} is not supported with HDP's ring attention yet: "
                f"{setting.way_out}, or train without --hdp."
            )
    return found + _window_refusals(config)
