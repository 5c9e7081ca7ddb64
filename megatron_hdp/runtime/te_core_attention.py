# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's core attention, as Megatron wraps it, under HDP. No GPU has run this yet.

With --hdp-attention transformer_engine it runs a micro-batch's ring over a process group, with any
other choice it gives way to HDP's own ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.runtime.attention.transformer_engine import TEMicroBatch
from megatron_hdp.runtime.core_attention import carried_state, mark_sinks, run_ring


def te_core_attention() -> Any:
    """Megatron's TEDotProductAttention; None where Transformer Engine is not installed."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine.TEDotProductAttention if transformer_engine.HAVE_TE else None


def ring_te_class(core_attention: type) -> type:
    """A subclass of `core_attention` (TEDotProductAttention or one of its own subclasses)."""

    class RingTEDotProductAttention(core_attention):  # type: ignore[misc,valid-type]
        """TEDotProductAttention; with an HDP micro-batch it runs the micro-batch's ring."""

        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            given = kwargs.get("softmax_scale")
            # Older versions hand the scale to their kernels and keep no attribute of it.
            self.softmax_scale = given or config.kv_channels**-0.5
            mark_sinks(self)
            wrapper = te_core_attention()
            if wrapper.cp_stream is None:
                # Megatron makes it for a static context-parallel size above 1 only.
                wrapper.cp_stream = torch.cuda.Stream()

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: PackedSeqParams | None = None,
            num_splits: int | None = None,
        ) -> torch.Tensor:
            state = carried_state(packed_seq_params)
            if state is None:
                return super().forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attn_mask_type,
                    attention_bias,
                    packed_seq_params,
                    num_splits,
                )
            if state.transformer_engine is None:
                return run_ring(self, query, key, value, state)
            return self._run_groups(query, key, value, state.transformer_engine)

        def _run_groups(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            micro_batch: TEMicroBatch,
        ) -> torch.Tensor:
            forward = super().forward

            def attention(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: PackedSeqParams
            ) -> torch.Tensor:
                return forward(q, k, v, None, AttnMaskType.padding_causal, packed_seq_params=params)

            with _group_kept(self):
                return micro_batch.run(attention, query, key, value)

    return RingTEDotProductAttention


_GROUP_ATTRIBUTES = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
"""What DotProductAttention.set_context_parallel_group assigns."""


@contextmanager
def _group_kept(module: Any) -> Iterator[None]:
    """Puts the module's own group back, for forwards outside HDP.

    Backward needs no module: Transformer Engine's autograd context keeps the group of its forward.
    """
    before = {name: getattr(module, name) for name in _GROUP_ATTRIBUTES}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
