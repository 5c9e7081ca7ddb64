# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention settings that the ring would ignore are refused, with the flag and the way out."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_hdp.runtime.attention.support import SETTINGS, check_attention_config

ASKED = {
    "multi_latent_attention": True,
    "window_size": (128, 0),
    "softmax_type": "learnable",
    "attention_dropout": 0.1,
    "apply_query_key_layer_scaling": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
}


@pytest.mark.parametrize("attribute", ASKED)
def test_one_sentence_names_flag_and_value(attribute):
    value = ASKED[attribute]
    (sentence,) = check_attention_config(SimpleNamespace(**{attribute: value}))
    assert sentence.startswith("--" + attribute.replace("_", "-"))
    assert value is True or str(value) in sentence
    assert "train without --hdp" in sentence


def test_megatrons_own_defaults_pass_and_the_names_are_its_own(megatron_on_cpu):
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    fields = {f.name for f in dataclasses.fields(MLATransformerConfig)}
    assert {setting.attribute for setting in SETTINGS} <= fields
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0
    )
    assert check_attention_config(config) == []


def test_a_model_built_elsewhere_is_refused_too(megatron_on_cpu):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hdp.runtime.model import check_config

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=0.0,
        calculate_per_token_loss=True, softmax_type="off-by-one",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="--softmax-type off-by-one"):
        check_config(config)
