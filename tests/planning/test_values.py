# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Values, validation and digest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.planning import PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.order import find_deadlock
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.values import cut_points, shard_tokens


@pytest.fixture
def plan():
    lengths = np.array([250, 120, 130, 60, 70, 5, 8, 64, 30, 1])
    config = PlannerConfig(num_ranks=4, capacity=64, strategy="naive")
    return plan_step(config, StepRequest(np.arange(10), lengths))


def test_shards_of_a_sequence_are_the_sequence():
    for length in (1, 2, 3, 7, 64, 101):
        for size in range(2, 9):
            cuts = cut_points(length, size)
            assert cuts[0] == 0
            assert cuts[-1] == length
            shards = shard_tokens(np.full(size, length), np.full(size, size), np.arange(size))
            assert shards.sum() == length
            exact = [cuts[i + 1] - cuts[i] + cuts[2 * size - i] - cuts[2 * size - 1 - i]
                     for i in range(size)]  # fmt: skip
            assert shards.tolist() == exact


def test_micro_batches_hold_every_token_once(plan):
    seen: dict[int, int] = {}
    for rank in range(plan.num_ranks):
        for micro_batch in plan.micro_batches(rank):
            for sequence in micro_batch.local_sequences:
                seen[sequence.id] = seen.get(sequence.id, 0) + sequence.length
            for sequence in micro_batch.ring_sequences:
                ring = micro_batch.ring
                tokens = shard_tokens(sequence.length, ring.size, ring.ranks.index(rank))
                seen[sequence.id] = seen.get(sequence.id, 0) + int(tokens)
    assert seen == dict(zip(plan.ids.tolist(), plan.lengths.tolist(), strict=True))


def _changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


MUTATIONS = {
    "lost token": lambda p: {"lengths": _changed(p.lengths, 0, p.lengths[0] - 1)},
    "lost sequence": lambda p: {
        name: getattr(p, name)[:-1] for name in ("ids", "lengths", "ring_of", "rank_of", "slot_of")
    },
    "sequence twice": lambda p: {"ids": _changed(p.ids, 1, p.ids[0])},
    "doubled rank": lambda p: {"ring_ranks": _changed(p.ring_ranks, 1, p.ring_ranks[0])},
    "rank outside": lambda p: {"ring_ranks": _changed(p.ring_ranks, 0, 4)},
    "swapped slot": lambda p: {"ring_slots": _changed(p.ring_slots, 0, p.ring_slots[1])},
    "missing slot": lambda p: {
        "micro_batch_counts": _changed(p.micro_batch_counts, 0, p.micro_batch_counts[0] - 1)
    },
    "no micro-batch": lambda p: {"micro_batch_counts": _changed(p.micro_batch_counts, 2, 0)},
    "over capacity": lambda p: {"capacity": 40},
    "both ring and rank": lambda p: {"rank_of": _changed(p.rank_of, 0, 1)},
    "ring of one": lambda p: {
        "ring_offsets": _changed(p.ring_offsets, 1, 1),
    },
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_validate_catches_mutations(plan, name):
    plan.validate(ids=plan.ids, lengths=plan.lengths)
    broken = replace(plan, **MUTATIONS[name](plan))
    with pytest.raises(PlanError):
        broken.validate(ids=plan.ids, lengths=plan.lengths)


@pytest.mark.parametrize("strategy", ["auto", "naive", "dp-balance"])
def test_experts_need_equal_slots_and_a_missing_one_is_caught(strategy):
    """Ranks that share experts meet in every layer: one slot less on a rank hangs the others."""
    lengths = np.array([250, 5, 8, 3, 64, 30, 1, 2, 2, 9])
    config = PlannerConfig(num_ranks=4, capacity=64, strategy=strategy, expert_ranks=4)
    plan = plan_step(config, StepRequest(np.arange(10), lengths))
    assert len(set(plan.micro_batch_counts.tolist())) == 1
    counts = plan.micro_batch_counts + np.array([0, 0, 0, 1], np.int32)
    with pytest.raises(PlanError, match="which share experts, need equally many"):
        replace(plan, micro_batch_counts=counts, predicted_s=np.zeros(0)).validate(expert_ranks=4)


def test_an_exchange_that_a_rank_enters_in_another_order_is_caught():
    """Each of two rings could wait for its other member; joined by experts they wait in a cycle."""
    local = None
    crossed = {0: [(0, 2), local], 1: [local, (1, 3)], 2: [local, (0, 2)], 3: [(1, 3), local]}
    assert find_deadlock(crossed, 1) is None
    assert "waits for ever" in find_deadlock(crossed, 1, expert_ranks=2)
    missing = {0: [local], 1: [local, local]}
    assert find_deadlock(missing, 1) is None
    assert "the experts of ranks (0, 1)" in find_deadlock(missing, 1, expert_ranks=2)


def test_ranks_that_share_experts_start_and_end_a_slot_together():
    """Local sequences of 100 and 300, then 300 and 100: 400 tokens' time alone, 600 together."""
    lengths = np.array([100, 300, 300, 100])
    builder = PlanBuilder(np.arange(4), lengths, 2, 1000)
    for sequence, (rank, slot) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        builder.add_local(rank, slot, [sequence])
    plan = builder.build(0, "by hand", expert_ranks=2)
    cost = CostModel.load("h100-estimate")
    fixed, long = cost.fixed_s, float(cost.local_s(np.array([300]))[0])
    short = float(cost.local_s(np.array([100]))[0])
    assert replay(plan, cost).step_s == pytest.approx(2 * fixed + long + short, rel=1e-12)
    together = replay(plan, cost.with_experts(2)).step_s
    assert together == pytest.approx(2 * (fixed + long), rel=1e-12)
    sending = cost.with_experts(2, exchange_bytes=1e6)
    exchange = cost.layers * 300 * 1e6 / 2 / cost.inside_bytes_s
    assert replay(plan, sending).step_s == pytest.approx(together + 2 * exchange, rel=1e-12)


def test_auto_takes_the_faster_of_both_planners_where_ranks_share_experts():
    """Equal slots by themselves say nothing of time: ranks wait for the longest one in each."""
    lengths = draw("wikipedia", 400_000, 65536, 3)
    request = StepRequest(np.arange(len(lengths)), lengths)
    config = PlannerConfig(num_ranks=8, capacity=8192, expert_ranks=8)
    cost, plan = config.cost(), plan_step(config, request)
    assert len(set(plan.micro_batch_counts.tolist())) == 1
    step_s = replay(plan, cost).step_s
    by_ranks = plan_step(replace(config, expert_ranks=1), request)
    padded = replace(by_ranks, micro_batch_counts=by_ranks.micro_batch_counts)
    assert step_s <= replay(padded, cost).step_s
    assert step_s <= 1.05 * lower_bound(lengths, 8, 8192, cost)


def test_digest_names_the_field(plan):
    base = plan.digest(corpus="a", config="x")
    assert plan.digest(corpus="a", config="x") == base
    swapped = replace(plan, ids=plan.ids[::-1].copy())
    moved = replace(plan, rank_of=plan.rank_of[::-1].copy())
    for other, field in (
        (plan.digest(corpus="b", config="x"), "corpus"),
        (plan.digest(corpus="a", config="y"), "config"),
        (swapped.digest(corpus="a", config="x"), "sequences"),
        (moved.digest(corpus="a", config="x"), "layout"),
    ):
        differing = [f for f in base._fields if getattr(base, f) != getattr(other, f)]
        assert differing == [field]


def test_predicted_times_are_not_in_the_digest(plan):
    assert replace(plan, predicted_step_s=1.0).digest() == plan.digest()


@pytest.mark.parametrize(
    ("lengths", "degrees"),
    [([8192], [1]), ([16384], [2]), ([8193], [2]), ([312 * 1024], [39]), ([768 * 1024], [96])],
)
def test_naive_uses_the_papers_degrees(lengths, degrees):
    config = PlannerConfig(num_ranks=128, capacity=8192, strategy="naive")
    plan = plan_step(config, StepRequest(np.arange(1), np.array(lengths)))
    sizes = plan.ring_sizes.tolist() or [1]
    assert sizes == degrees


def test_a_sequence_over_the_domain_is_refused_with_what_would_fit():
    config = PlannerConfig(num_ranks=3, capacity=10, strategy="naive")
    with pytest.raises(PlanError, match=r"31 tokens does not fit 3 ranks of capacity 10.*least 11"):
        plan_step(config, StepRequest(np.arange(1), np.array([31])))


def test_static_is_the_mesh():
    config = PlannerConfig(num_ranks=4, capacity=10, strategy="static", context_parallel_size=2)
    lengths = np.array([20, 5, 15, 7, 8])
    request = StepRequest(np.arange(5), lengths, packs=np.array([0, 1, 3, 4, 5]))
    plan = plan_step(config, request)
    assert plan.ring_ranks.reshape(-1, 2).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert plan.ring_slots.tolist() == [0, 0, 1, 1]
    assert plan.travelled_token_share == 1.0
