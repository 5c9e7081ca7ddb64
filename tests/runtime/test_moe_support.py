# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""MoE settings whose meaning depends on the plan are refused in one sentence; others are not."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_hdp.runtime.moe.support import check_moe_arguments

FINE = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 1,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "recompute_modules": ["core_attn"],
}
REFUSED = {
    "moe_router_load_balancing_type": ("sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
    "moe_token_dispatcher_type": ("allgather", "--moe-token-dispatcher-type allgather"),
    "moe_expert_capacity_factor": (1.5, "--moe-expert-capacity-factor 1.5"),
    "moe_input_jitter_eps": (0.1, "--moe-input-jitter-eps 0.1"),
    "recompute_modules": (["moe"], "--recompute-modules moe"),
}


def test_what_is_supported_passes():
    assert check_moe_arguments(Namespace(**FINE)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_is_one_sentence_with_a_way_out(name):
    value, flag = REFUSED[name]
    (sentence,) = check_moe_arguments(Namespace(**{**FINE, name: value}))
    assert sentence.startswith(flag)
    assert ": " in sentence
    assert sentence.endswith(".")


def test_a_list_of_losses_is_taken_apart():
    kinds = ["aux_loss", "global_aux_loss"]
    (sentence,) = check_moe_arguments(
        Namespace(**{**FINE, "moe_router_load_balancing_type": kinds})
    )
    assert "global_aux_loss" in sentence


def test_dense_models_are_none_of_its_business():
    assert check_moe_arguments(Namespace(num_experts=None)) == []
