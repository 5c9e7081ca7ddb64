# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What the offload arguments refuse, and what they become."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_hdp.planning import PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.activations import saved_bytes
from megatron_hdp.planning.values import Plan


@pytest.mark.parametrize(
    ("argv", "more", "words"),
    [
        ("--hdp-offload-ratio 1.5", {}, ["--hdp-offload-ratio 1.5", "from 0 to 1"]),
        (
            "--hdp-offload-ratio 0.5 --hdp-offload",
            {},
            ["--hdp-offload-ratio 0.5", "one of the two"],
        ),
        ("--hdp-host-memory 0", {}, ["--hdp-host-memory 0", "above 0"]),
        ("--hdp-device-memory -1", {}, ["--hdp-device-memory -1", "above 0"]),
        (
            "--hdp-offload",
            {"gradient_accumulation_fusion": True, "transformer_impl": "local"},
            ["--transformer-impl local", "--no-gradient-accumulation-fusion"],
        ),
        (
            "--hdp-offload",
            {"fine_grained_activation_offloading": True},
            ["--fine-grained-activation-offloading", "use --hdp-offload instead"],
        ),
    ],
)
def test_one_sentence(parse, argv, more, words):
    from megatron_hdp.runtime.validation import refusals

    found = refusals(SimpleNamespace(**{**vars(parse(argv)), **more}))
    assert len(found) == 1
    for word in words:
        assert word in found[0]


def test_what_the_planner_is_told(parse):
    from megatron_hdp.runtime.model_shape import model_shape
    from megatron_hdp.runtime.options import HdpOptions
    from megatron_hdp.runtime.planner import planner_config

    args = parse("--hdp-offload --hdp-host-memory 3 --hdp-capacity 64")
    args.params_dtype, args.kv_channels = torch.float32, 16  # validate_args does
    args.exp_avg_dtype = args.exp_avg_sq_dtype = torch.float32
    args.padded_vocab_size, args.data_parallel_size, args.world_size = 128, 4, 4
    args.expert_tensor_parallel_size = 1
    config = planner_config(args, HdpOptions.from_args(args), 4)
    assert (config.offload, config.offload_ratio) == (True, None)
    assert config.host_memory == 3 * 2**30
    assert config.layers_per_stage == args.num_layers
    assert config.activation_bytes == saved_bytes(model_shape(args))
    saved = config.activation_bytes * config.layers_per_stage
    assert config.loss_share == 4 * 128 / saved  # fp32 logits and softmax share one buffer
    assert config.recomputed_share == 0
    args.recompute_granularity, args.recompute_method = "full", "uniform"
    args.recompute_num_layers = 1
    config = planner_config(args, HdpOptions.from_args(args), 4)
    checkpoints = 4 * args.hidden_size * args.num_layers
    assert config.recomputed_share == saved / args.num_layers / checkpoints  # a layer
    args.hdp_cross_entropy = "chunked"
    assert planner_config(args, HdpOptions.from_args(args), 4).loss_share == 0


@pytest.mark.parametrize(
    "given",
    [
        "--num-layers-per-virtual-pipeline-stage 2",
        "--num-virtual-stages-per-pipeline-rank 3",
        "--pipeline-model-parallel-layout Et|tt|tt|tt|tt|ttL",
    ],
)
def test_more_model_chunks_than_layers_that_the_planner_keeps(parse, given):
    from megatron_hdp.runtime.validation import refusals

    line = f"--num-layers 12 --pipeline-model-parallel-size 2 {given}"
    (found,) = refusals(parse(f"{line} --hdp-offload"))
    for word in (given, "of 3 virtual", "at most 2", "--hdp-offload-ratio"):
        assert word in found
    assert refusals(parse(f"{line} --hdp-offload-ratio 0.5")) == refusals(parse(line)) == []
    two = line.replace("stage 2", "stage 3").replace("rank 3", "rank 2").replace("|tt|tt|", "|")
    assert refusals(parse(f"{two} --hdp-offload")) == []


def _plan(**options) -> Plan:
    lengths = np.array([100, 30, 40, 7], np.int64)
    config = PlannerConfig(num_ranks=4, capacity=64, strategy="naive", **options)
    return plan_step(config, StepRequest(np.arange(4), lengths))


def test_a_given_ratio_changes_nothing_else_of_the_plan():
    plain, given = _plan(), _plan(offload_ratio=0.5)
    assert set(given.offload_ratios) == {0.5}
    for field in dataclasses.fields(Plan):
        if field.name not in ("offload_ratios", "num_layers"):
            assert np.array_equal(getattr(plain, field.name), getattr(given, field.name))
