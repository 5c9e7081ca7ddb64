# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention settings that the ring would ignore are refused, with the flag and the way out."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_hdp.runtime.attention.support import (
    SETTINGS,
    attention_window,
    check_attention_config,
    replaced_choices,
)

ASKED = {
    "multi_latent_attention": True,
    "attention_dropout": 0.1,
    "apply_query_key_layer_scaling": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "use_kitchen_attention": True,
    "batch_invariant_mode": True,
    "experimental_attention_variant": "dsa",
    "linear_attention_freq": 4,
}


@pytest.mark.parametrize("attribute", ASKED)
def test_one_sentence_names_flag_and_value(attribute):
    value = ASKED[attribute]
    (sentence,) = check_attention_config(SimpleNamespace(**{attribute: value}))
    assert sentence.startswith("--" + attribute.replace("_", "-"))
    assert value is True or str(value) in sentence
    assert "train without --hdp" in sentence


@pytest.mark.parametrize(
    ("given", "window"),
    [((128, 0), 128), ((0, 0), 0), ((-1, -1), None), ((-1, 0), None), (None, None)],
)
def test_windows_that_end_at_the_token_are_honoured(given, window):
    config = SimpleNamespace(window_size=given)
    assert check_attention_config(config) == []
    assert attention_window(config) == window


@pytest.mark.parametrize("given", [(128, 64), (128, -1), (-1, 5), (128,)])
def test_other_windows_are_one_sentence(given):
    (sentence,) = check_attention_config(SimpleNamespace(window_size=given))
    assert f"--window-size {','.join(map(str, given))}: " in sentence
    assert "pass --window-size 128,0" in sentence


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
        calculate_per_token_loss=True, window_size=(8, 8),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"--window-size 8,8: .* pass --window-size 8,0"):
        check_config(config)


def test_every_attention_setting_of_megatron_is_sorted(megatron_on_cpu):
    """A field about attention that a new Megatron brings must be refused, honoured or reported."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hdp.runtime.attention.support import _KERNEL_CHOICES

    words = "attention attn softmax window_size qk_clip flash kitchen cp_comm batch_inv".split()
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    found = {name for name in fields if any(word in name for word in words)}
    sorted_out = {setting.attribute for setting in SETTINGS} | {c[0] for c in _KERNEL_CHOICES}
    assert found - sorted_out == {
        # Honoured: sizes, the scale, and what acts before or behind core attention.
        "num_attention_heads", "softmax_scale", "attention_output_gate", "mup_attn_scale_power",
        # Honoured by the ring's own softmax.
        "window_size", "window_attn_skip_freq", "softmax_type",
        # Details of settings that are refused.
        "qk_clip_alpha", "qk_clip_threshold", "use_kitchen",
        "kitchen_attention_backend", "experimental_attention_variant_loss_scale_func",
        # The ring's softmax is in fp32; inference only.
        "attention_softmax_in_fp32", "masked_softmax_fusion", "flash_decode",
        # Not about core attention.
        "moe_router_pre_softmax", "ep_overlap_early_attn_memory_release",
    }  # fmt: skip


def test_flags_of_other_kernels_are_reported(megatron_on_cpu):
    from megatron.core.transformer.enums import AttnBackend

    args = SimpleNamespace(
        attention_backend=AttnBackend.fused, flash_attention_version=3, cp_comm_type=["p2p", "a2a"]
    )
    note = replaced_choices(args)
    for words in ("--attention-backend fused", "--flash-attention-version 3", "p2p a2a"):
        assert words in note
    kept = SimpleNamespace(attention_backend=AttnBackend.auto, cp_comm_type=["p2p"])
    assert replaced_choices(kept) is None


def test_transformer_engines_ring_needs_a_fitting_line(megatron_on_cpu):
    from megatron_hdp.runtime.attention.backend_support import transformer_engine_refusals

    line = {"transformer_impl": "local", "cp_comm_type": ["p2p", "a2a"], "hdp_te_groups": 0,
            "window_size": (8, 0), "softmax_type": "learnable"}  # fmt: skip
    found = transformer_engine_refusals(SimpleNamespace(**line))
    for sentence, words in zip(found, ("--transformer-impl local", "--cp-comm-type a2a",
                               "--window-size (8, 0)", "--softmax-type learnable",
                               "--hdp-te-groups 0"), strict=True):  # fmt: skip
        assert sentence.startswith(words)
    good = {"transformer_impl": "transformer_engine", "cp_comm_type": ["p2p"], "hdp_te_groups": 1,
            "window_size": None, "softmax_type": "vanilla"}  # fmt: skip
    assert transformer_engine_refusals(SimpleNamespace(**good)) == []


@pytest.mark.parametrize(("given", "words"), [
    ({}, None),
    ({"hdp_head_parallel": "off", "window_size": (8, 0)}, None),
    ({"window_size": (8, 0)}, "auto does not go with --window-size"),
    ({"hdp_attention": "transformer_engine"}, "auto does not go with --hdp-attention"),
    ({"hdp_head_parallel": "4"}, "4: use one of off, auto"),
])  # fmt: skip
def test_what_goes_with_splitting_heads(megatron_on_cpu, given, words):
    from megatron_hdp.runtime.attention.backend_support import head_parallel_refusals

    line = {"hdp_head_parallel": "auto", "hdp_attention": "auto", **given}
    found = head_parallel_refusals(SimpleNamespace(**line))
    assert len(found) == (words is not None)
    assert words is None or found[0].startswith(f"--hdp-head-parallel {words}")
