# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which rings split heads: by hand, never slower, never more bytes, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.planning import PlanError, PlannerConfig, StepRequest, plan_step, predict_step
from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.head_parallel import HeadShape, with_head_degrees
from megatron_hdp.planning.replay import micro_batch_s

MHA, GQA = HeadShape(32, 32, 128), HeadShape(32, 4, 128)
COST = CostModel.load("h100-estimate")


def test_bytes_of_the_attention_page():
    """KiB per token of a shard: of the ring, of a degree, and which."""
    wanted = {
        GQA: {2: (8, 18, 2), 4: (24, 27, 4), 8: (56, 35, 4), 16: (120, 51, 4)},
        MHA: {2: (64, 32, 2), 4: (192, 48, 4), 8: (448, 56, 8), 16: (960, 120, 8)},
    }
    for shape, rows in wanted.items():
        for size, (ring, split, degree) in rows.items():
            assert shape.sent_bytes(size, 1) == ring * 1024
            assert shape.sent_bytes(size, degree) == split * 1024
    assert HeadShape(12, 6, 64).degrees() == (2, 3, 6)
    assert HeadShape(8, 1, 64).degrees() == ()


def _one_ring(ranks, length, num_ranks=32):
    builder = PlanBuilder(np.array([0]), np.array([length]), num_ranks, length)
    builder.add_ring(ranks, 0, [0])
    return builder.build(0, "by hand")


@pytest.mark.parametrize(("ranks", "length", "wanted"), [
    (range(8), 4096, 8),  # hops longer than their 512 tokens' compute: every byte counts
    (range(8), 262144, 1),  # hidden hops: an exchange would only stand in the way
    (range(16), 32768, 8),  # across nodes; groups of 8 exchange inside them
    ([0, 8, 1, 9], 2048, 4),
    (range(5), 4096, 1),  # 5 divides no 32 heads
])  # fmt: skip
def test_the_degree_is_the_fastest_by_hand(ranks, length, wanted):
    plan = _one_ring(ranks, length)
    config = PlannerConfig(num_ranks=32, capacity=length, cost_model=COST, heads=MHA)
    size, seconds = len(ranks), {}
    for u in (1, *MHA.degrees()):
        if size % u:
            continue
        shard, node = length / size, [rank // 8 for rank in ranks]
        across = len(set(node)) > 1
        apart = any(len(set(node[at : at + u])) > 1 for at in range(0, size, u))
        step = COST.attention_s * length**2 * u / size**2
        transfer = 65536 * shard / (4.5e10 if across else 3.5e11) + COST.latency_s
        moved = 65536 * (u - 1) / u * shard / (4.5e10 if apart else 3.5e11)
        exchange = moved + 4 / 3 * COST.latency_s if u > 1 else 0.0
        seconds[u] = 32 * (COST.linear_s * shard + step + (size / u - 1) * max(step, transfer)
                           + exchange) + COST.fixed_s  # fmt: skip
    found = with_head_degrees(plan, config)
    degree = int(found.head_degrees[0]) if len(found.head_degrees) else 1
    assert degree == min(seconds, key=seconds.get) == wanted
    assert micro_batch_s(found, config.cost())[0] == pytest.approx(seconds[degree])


def test_recompute_exchanges_heads_a_third_time():
    again = replace(MHA, recomputed=1.0)
    costs = [PlannerConfig(32, 4096, cost_model=COST, heads=shape).cost() for shape in (MHA, again)]
    exchanges = [
        cost.head_exchange_s(np.array([512.0]), np.array([4]), cost.hop_s(np.array([4])))
        for cost in costs
    ]
    assert exchanges[1] == pytest.approx(1.5 * exchanges[0])
    assert costs[0].ring_bytes == costs[1].ring_bytes
    # 32 groups of 128 in bf16: K and V once more per hop.
    assert again.sent_bytes(8, 1) - MHA.sent_bytes(8, 1) == 7 * 2 * 2 * 32 * 128


@pytest.mark.parametrize(("size", "shard", "degree", "ratio"), [
    (16, 4096, 8, 2.71), (16, 8192, 4, 1.77), (16, 16384, 2, 1.06), (32, 8192, 4, 1.94),
])  # fmt: skip
def test_predictions_of_the_attention_page(size, shard, degree, ratio):
    plan = _one_ring(range(size), size * shard)
    config = PlannerConfig(num_ranks=32, capacity=size * shard, cost_model=COST, heads=MHA)
    found = with_head_degrees(plan, config)
    assert found.head_degrees.tolist() == [degree]
    whole, split = (micro_batch_s(one, config.cost())[0] for one in (plan, found))
    assert whole / split == pytest.approx(ratio, abs=0.005)
    assert with_head_degrees(plan, replace(config, heads=GQA)) == plan


@pytest.mark.parametrize("strategy", ["auto", "naive"])
@pytest.mark.parametrize("shape", [MHA, GQA, HeadShape(6, 6, 128)])
def test_no_micro_batch_gets_slower(shape, strategy):
    cost = replace(COST, ring_bytes=shape.hop_bytes)
    whole = PlannerConfig(num_ranks=24, capacity=2048, strategy=strategy, cost_model=cost)
    config = replace(whole, heads=shape)
    split = 0
    for seed in range(4):
        lengths = draw("byted", 60_000, 40_000, seed)
        request = StepRequest(np.arange(len(lengths)), lengths)
        before = predict_step(whole, plan_step(whole, request))
        after = predict_step(config, plan_step(config, request))
        assert after.predicted_step_s <= before.predicted_step_s
        assert np.all(after.predicted_s <= before.predicted_s)
        assert np.array_equal(before.ring_ranks, after.ring_ranks)
        degrees = after.head_degrees if len(after.head_degrees) else np.ones(1, int)
        split += int((degrees > 1).sum())
        if degrees.max() > 1:
            sizes = after.ring_sizes[degrees > 1]
            sent = shape.sent_bytes(sizes, degrees[degrees > 1])
            assert np.all(sent < shape.sent_bytes(sizes, 1))
            assert before.digest().layout != after.digest().layout
            found = {mb.head_degree for rank in range(24) for mb in after.micro_batches(rank)}
            assert found - {1} == set(degrees.tolist()) - {1}
    assert split > 0


def test_validate_refuses_what_does_not_divide_the_ring():
    plan = _one_ring(range(6), 600)
    replace(plan, head_degrees=np.array([3])).validate()
    with pytest.raises(PlanError, match="ring of 6 ranks cannot split heads over 4 of them"):
        replace(plan, head_degrees=np.array([4])).validate()
    with pytest.raises(PlanError, match="head_degrees do not match its 1 rings"):
        replace(plan, head_degrees=np.array([3, 3])).validate()
