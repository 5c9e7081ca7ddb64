# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""RoPE by position gives the rows of Megatron's own table, interleaved and partial ones too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interpolation", [None, 4.0])
def test_positions_take_rows_of_megatrons_table(
    megatron_on_cpu, interleaved, percent, interpolation
):
    from megatron.core.models.common.embeddings.rope_utils import (
        _apply_rotary_pos_emb_bshd,
        _apply_rotary_pos_emb_thd,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_hdp.runtime.model import OneRankGroup
    from megatron_hdp.runtime.rope import PositionRotaryEmbedding

    rotary = RotaryEmbedding(
        16, percent, rotary_interleaved=interleaved, use_cpu_initialization=True,
        seq_len_interpolation_factor=interpolation, cp_group=OneRankGroup(),
    )  # fmt: skip
    rotary.inv_freq = rotary.inv_freq.double()
    positions = torch.tensor([0, 1, 2, 9, 10, 0, 1, 40])
    embedding = PositionRotaryEmbedding(rotary)
    carried = SimpleNamespace(hdp=SimpleNamespace(positions=positions))
    asked = embedding.get_rotary_seq_len(None, None, None, None, carried)
    got = embedding(asked)
    table = rotary.get_emb(64)
    assert torch.equal(got, table[positions])

    whole = torch.randn(64, 3, 16, dtype=torch.float64)
    wanted = _apply_rotary_pos_emb_bshd(whole[:, None], table, rotary_interleaved=interleaved)
    rotated = _apply_rotary_pos_emb_thd(
        whole[positions], torch.tensor([0, len(positions)], dtype=torch.int32), got,
        rotary_interleaved=interleaved, cp_group=OneRankGroup(),
    )  # fmt: skip
    assert torch.equal(rotated, wanted[positions, 0])
    assert not torch.equal(rotated[3:5], whole[[9, 10]])
