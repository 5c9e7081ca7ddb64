# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto` offloads where the predicted step falls, and only what hides behind compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planning import PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.degrees import copies_are_hidden, with_needed_offload
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.laminar import plan_laminar
from megatron_hdp.planning.replay import replay

SLOW_LINKS = PlannerConfig(64, 8192, slower_across=4.0)


def _plan(config, lengths):
    return plan_step(config, StepRequest(np.arange(len(lengths)), lengths))


@pytest.fixture(scope="module")
def lengths():
    return draw("byted", 8 * 64 * 8192, 64 * 8192, 101)


def _step_s(config, lengths):
    plan = _plan(config, lengths)
    return replay(plan, config.cost(), config.pipeline_depth).step_s


def test_on_slow_links_offload_narrows_rings_and_shortens_the_step(lengths):
    with_offload = replace(SLOW_LINKS, offload=True)
    plan = _plan(with_offload, lengths)
    plain = _plan(SLOW_LINKS, lengths)
    assert _step_s(with_offload, lengths) < 0.96 * _step_s(SLOW_LINKS, lengths)
    assert plan.offload_ratios.max() > 0
    assert plan.ring_sizes.max() < plain.ring_sizes.max()
    assert plan.micro_batch_tokens.max() > SLOW_LINKS.capacity
    assert plan.resident_tokens(1).max() <= SLOW_LINKS.capacity + 64
    assert copies_are_hidden(plan, with_offload)


@pytest.mark.parametrize("limit", ["copies", "host memory"])
def test_no_offload_where_copies_would_show_or_not_fit(lengths, limit):
    preset = CostModel.load("h100-estimate")
    config = replace(SLOW_LINKS, offload=True, cost_model=replace(preset, host_copy_bytes_s=1e6))
    if limit == "host memory":
        config = replace(SLOW_LINKS, offload=True, host_memory=1e6)
    plan = _plan(config, lengths)
    assert not len(plan.offload_ratios) or plan.offload_ratios.max() == 0
    assert _step_s(config, lengths) <= _step_s(replace(config, offload=False), lengths)
    forced = replace(config, ring_room=2 * config.capacity)
    request = StepRequest(np.arange(len(lengths)), lengths)
    assert not copies_are_hidden(with_needed_offload(plan_laminar(forced, request), forced), forced)


@pytest.mark.parametrize(
    ("depth", "loss_share", "host_memory"), [(1, 0.0, 1e12), (4, 0.3, 200e9), (1, 0.0, 200e9)]
)
def test_the_papers_narrow_ring_is_taken_where_the_host_holds_it(depth, loss_share, host_memory):
    config = PlannerConfig(
        64, 8192, slower_across=64.0, pipeline_depth=depth, loss_share=loss_share, offload=True,
        host_memory=host_memory,
    )  # fmt: skip
    lengths, paper = np.array([200_000]), replace(config, strategy="naive")
    held = (depth, host_memory) != (1, 200e9)
    assert copies_are_hidden(_plan(paper, lengths), config) is held
    assert copies_are_hidden(_plan(config, lengths), config)
    best = replace(paper, offload=held)
    assert _step_s(config, lengths) <= _step_s(best, lengths) * (1 + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1.0, 8.0]),
    st.integers(1, 50), st.integers(0, 2**20),
)  # fmt: skip
def test_offload_never_lengthens_the_predicted_step(ranks, depth, slower, count, seed):
    random = np.random.RandomState(seed)
    lengths = np.exp(random.uniform(0, np.log(ranks * 8192), count)).astype(np.int64)
    config = PlannerConfig(ranks, 8192, pipeline_depth=depth, slower_across=slower)
    offload = replace(config, offload=True)
    assert _step_s(offload, lengths) <= _step_s(config, lengths) * (1 + 1e-9)
    plan = _plan(offload, lengths)
    assert replay(plan, config.cost(), depth).step_s >= plan.lower_bound_s * (1 - 1e-9)
