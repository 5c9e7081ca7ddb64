# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""RoPE from the explicit positions of a rank's own tokens.

No table of the context length and no cache keyed by a group (upstream's forward is an lru_cache
over lengths and groups): frequencies are made once per micro-batch for the T tokens that are here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_hdp.runtime.micro_batch import MicroBatchState


class PositionRotaryEmbedding(torch.nn.Module):
    """Takes the place of `GPTModel.rotary_pos_emb`; any other forward goes to the original.

    GPTModel asks `get_rotary_seq_len` with the PackedSeqParams and hands what it returns to
    `forward`, so the positions pass through that call.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.original = rotary

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | int:
        """The micro-batch's positions, int64 [T]; without one, the original's length."""
        state: MicroBatchState | None = getattr(packed_seq_params, "hdp", None)
        if state is not None:
            return state.positions
        length: int = self.original.get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )
        return length

    def forward(self, positions: torch.Tensor | int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Frequencies [T, 1, 1, d] of the given positions (RotaryEmbedding.get_emb's form)."""
        if not isinstance(positions, torch.Tensor):
            table: torch.Tensor = self.original(positions, *args, **kwargs)
            return table
        rotary = self.original
        if rotary.inv_freq.device != positions.device:
            rotary.inv_freq = rotary.inv_freq.to(positions.device)
        at = positions.to(rotary.inv_freq.dtype)
        if rotary.seq_len_interpolation_factor is not None:
            at = at * (1 / rotary.seq_len_interpolation_factor)
        half = torch.outer(at, rotary.inv_freq)
        if rotary.rotary_interleaved:
            whole = half.repeat_interleave(2, dim=-1)
        else:
            whole = torch.cat((half, half), dim=-1)
        return whole[:, None, None, :]
