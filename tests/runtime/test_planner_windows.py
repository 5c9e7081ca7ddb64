# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A launch line's sliding windows and heads reach the plans that its data iterator gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hdp.planning import StepRequest
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.head_parallel import HeadShape
from megatron_hdp.planning.windows import NO_WINDOWS, Windows


@pytest.fixture(scope="module")
def config_of(parse):
    from megatron_hdp.runtime.options import HdpOptions
    from megatron_hdp.runtime.planner import planner_config

    def make(argv):
        args = parse(f"--hdp-capacity 8192 --hdp-profile h100-estimate --num-layers 4 {argv}")
        args.params_dtype, args.kv_channels = torch.float32, 16  # validate_args does
        args.padded_vocab_size, args.data_parallel_size, args.world_size = 128, 4, 4
        return planner_config(args, HdpOptions.from_args(args), 4)

    return make


@pytest.mark.parametrize(
    ("argv", "windows"),
    [
        ("", NO_WINDOWS),
        ("--window-size=-1,0", NO_WINDOWS),
        ("--window-size 500,0", Windows(500, 1.0)),
        ("--window-size 0,0 --window-attn-skip-freq 4", Windows(0, 0.75)),
        ("--window-size 500,0 --window-attn-skip-freq [1,0,0,0]", Windows(500, 0.25)),
    ],
)
def test_what_the_planner_is_told(config_of, argv, windows):
    assert config_of(argv).windows == windows


def test_heads_without_a_degree_are_planned_and_counted_as_with_off(config_of):
    model = "--num-attention-heads 4 --hidden-size 64 --group-query-attention"
    off, one, two = (
        config_of(f"{model} --num-query-groups {groups} --hdp-head-parallel {choice}")
        for groups, choice in ((1, "off"), (1, "auto"), (2, "auto"))
    )
    assert one == off
    assert two.heads == HeadShape(4, 2, 16, 4)
    assert two.cost().ring_bytes == two.heads.hop_bytes
    # K and V of one more group, and the share of the output once more: values of 4 bytes.
    assert two.activation_bytes - off.activation_bytes == (2 * 1 + 4) * 16 * 4


@pytest.mark.parametrize(("argv", "share"), [
    ("", 0.0),
    ("--recompute-granularity selective", 1.0),
    ("--recompute-granularity selective --recompute-modules mlp", 0.0),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 0.25),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1.0),
])  # fmt: skip
def test_layers_whose_attention_runs_again_are_counted(config_of, argv, share):
    config = config_of(f"--num-attention-heads 4 --hdp-head-parallel auto {argv}")
    assert config.heads.recomputed == share
    assert config.cost().head_passes == 2 + share


def test_the_plan_of_a_step_is_another_one_and_predicted_for_windows(config_of):
    from megatron_hdp.runtime.planner import PlanInPlace

    lengths = draw("lognormal", 8 * 4 * 8192, 30000, 3)
    argv = ("", "--window-size 500,0 --window-attn-skip-freq 2")
    configs = [config_of(more) for more in argv]
    full, windowed = (
        PlanInPlace(config, lambda step: StepRequest(np.arange(len(lengths)), lengths, step=step))
        .get(0) for config in configs
    )  # fmt: skip
    assert full.digest() != windowed.digest()
    cost = configs[1].cost()
    for rank in range(4):
        for slot, micro_batch in enumerate(windowed.micro_batches(rank)):
            ring = micro_batch.ring.ranks if micro_batch.ring else (rank,)
            size, seconds = len(ring), cost.fixed_s
            for sequence in micro_batch.local_sequences:
                s = sequence.length
                squares = 0.5 * s * s + 0.5 * (s * s - max(0, s - 501) ** 2)
                seconds += cost.layers * (cost.attention_s * squares + cost.linear_s * s)
            for sequence in micro_batch.ring_sequences:  # its middle rows see 501 keys each
                s = sequence.length
                squares = 0.5 * s * s + 0.5 * 2 * s * 501
                seconds += (
                    cost.layers * (cost.attention_s * squares + cost.linear_s * s) / size
                )  # hops hide
            at = windowed.first_micro_batch[rank] + slot
            assert windowed.predicted_s[at] == pytest.approx(seconds, rel=1e-9)
