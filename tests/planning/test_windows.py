# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What sliding windows leave of attention and transfers: counted, and as the planners use it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planning import PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.values import MicroBatch, Ring, Sequence, cut_points
from megatron_hdp.planning.windows import Windows
from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.runtime.windows import windowed_calls
from tests.planning.test_planners import OWN, requests

SHARES = st.sampled_from([0.25, 0.5, 1.0])
LAYOUTS = st.tuples(st.integers(1, 40), st.integers(0, 700), st.integers(1, 9))
"""(tokens of half a chunk, window, ring)."""


def _pairs(length: int, window: int, ranks: int) -> list[int]:
    """Visible pairs of every member, one token after another."""
    cuts, seen = cut_points(length, ranks), np.minimum(np.arange(length), window) + 1
    return [
        int(sum(seen[cuts[c] : cuts[c + 1]].sum() for c in (i, 2 * ranks - 1 - i)))
        for i in range(ranks)
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(LAYOUTS, SHARES)
def test_squares_are_the_pairs_of_the_slowest_member(layout, share):
    half, window, ranks = layout
    length = 2 * ranks * half
    windowed, full = _pairs(length, window, ranks), _pairs(length, length, ranks)
    assert max(windowed) == windowed[-1]  # so squares of sequences on one ring add up
    counted = 2 * ranks * (share * max(windowed) + (1 - share) * max(full))
    squares = float(Windows(window, share).squares(length, ranks))
    assert -1e-6 <= counted - squares <= length + 1e-6
    even = 2 * share * sum(windowed) + 2 * (1 - share) * sum(full)
    assert squares <= 4 / 3 * even


@settings(max_examples=100, deadline=None, derandomize=True)
@given(LAYOUTS)
def test_hop_tokens_are_the_rows_that_members_receive(layout):
    half, window, ranks = layout
    length = 2 * ranks * half
    micro_batch = MicroBatch(0, Ring(tuple(range(ranks))), (Sequence(0, length),), ())
    layouts = [MicroBatchLayout.build(micro_batch, rank) for rank in range(ranks)]
    received = sum(sum(windowed_calls(one, window).received) for one in layouts)
    carried = Windows(window, 1.0).hop_tokens(np.array([length]), ranks) * (ranks - 1)
    assert carried == pytest.approx(received)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 2**20), st.integers(0, 2**20), SHARES, st.integers(1, 64))
def test_squares_rise_with_everything(length, window, share, ranks):
    windows = Windows(window, share)
    squares = windows.squares(length, ranks)
    most = 1 + 1e-9  # what is left of s^2 may be a millionth of it
    assert squares <= windows.squares(length + 1, ranks) * most
    assert squares <= Windows(window + 1, share).squares(length, ranks) * most
    assert squares <= windows.squares(length, ranks + 1) * most
    assert windows.squares(length) + windows.squares(ranks) <= (
        windows.squares(length + ranks) * most
    )
    assert Windows(length, share).squares(length, ranks) == float(length) ** 2
    assert Windows(window, 0.0).squares(length, ranks) == float(length) ** 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 2**20), st.integers(0, 2**20), SHARES, st.sampled_from(CostModel.presets()),
    st.sampled_from([1.0, 4.0, 100.0]),
)  # fmt: skip
def test_a_wider_ring_takes_no_less_rank_time(length, window, share, preset, slower):
    """What the area bound's proof needs."""
    cost = CostModel.load(preset).with_links(slower).with_windows(Windows(window, share))
    sizes = np.arange(1, 129)
    areas = sizes * cost.sequence_s(np.full(len(sizes), length), sizes)
    assert (areas[:-1] <= areas[1:] * (1 + 1e-9)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(requests(), st.sampled_from([0, 30, 2000]), SHARES, st.sampled_from([1, 2]))
def test_plans_of_windowed_layers(request_, window, share, depth):
    num_ranks, capacity, lengths = request_
    request = StepRequest(np.arange(len(lengths)), lengths)
    step_s = {}
    for strategy in OWN:
        config = PlannerConfig(
            num_ranks, capacity, strategy, pipeline_depth=depth, windows=Windows(window, share)
        )
        plan = plan_step(config, request)
        step_s[strategy] = replay(plan, config.cost(), depth).step_s
        bound = lower_bound(lengths, num_ranks, capacity, config.cost(), depth)
        assert step_s[strategy] >= bound * (1 - 1e-9)
    assert step_s["auto"] <= step_s["naive"] * (1 + 1e-9)


def test_a_window_outside_its_range_is_refused():
    with pytest.raises(PlanError, match="share of 2"):
        Windows(5, 2)


def test_a_file_may_hold_windows_and_those_of_the_launch_line_win(tmp_path):
    path, windows = tmp_path / "model.json", Windows(500, 0.5)
    model = CostModel.load("h100-estimate").with_windows(windows)
    path.write_text(json.dumps(dataclasses.asdict(model)))
    assert CostModel.load(str(path)) == model
    config = PlannerConfig(4, 8192, cost_model=str(path))
    assert config.cost().windows == windows
    given = Windows(30, 1.0)
    assert dataclasses.replace(config, windows=given).cost().windows == given
    for wrong in ("500", {"size": 500}, {"window": 500, "share": 2}):
        path.write_text(json.dumps({**dataclasses.asdict(model), "windows": wrong}))
        with pytest.raises(PlanError, match=r"model\.json cannot be read"):
            CostModel.load(str(path))
