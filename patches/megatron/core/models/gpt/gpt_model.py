# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Patches megatron.core.models.gpt.gpt_model: ring attention and RoPE by position in GPTModel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hdp.patches.registry import Patch


def _wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.cross_entropy.choice import choose_loss
    from megatron_hdp.runtime.model import bind, ring_spec

    @functools.wraps(original)
    def __init__(
        self: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any
    ) -> None:
        from megatron.training import get_args

        original(self, config, ring_spec(transformer_layer_spec), *args, **kwargs)
        bind(self, choose_loss(session.current_session().options, get_args()))

    return __init__


PATCHES = (
    Patch(
        target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        reason="Scripts build the model their own way: the layer spec and rotary_pos_emb, which "
        "are seams, must be set for models that a script which knows nothing of HDP makes.",
        parameters=(
            "self",
            "config",
            "transformer_layer_spec",
            "vocab_size",
            "max_sequence_length",
            "pre_process",
            "post_process",
            "fp16_lm_cross_entropy",
            "parallel_output",
            "share_embeddings_and_output_weights",
            "position_embedding_type",
            "rotary_percent",
            "rotary_base",
            "rope_scaling",
            "rope_scaling_factor",
            "scatter_embedding_sequence_parallel",
            "seq_len_interpolation_factor",
            "mtp_block_spec",
            "pg_collection",
            "vp_stage",
        ),
        wrap=_wrap_init,
    ),
)
