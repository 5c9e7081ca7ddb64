# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Thousands of plans x pipeline depths through a blocking model of Megatron's schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.planning import Plan, PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.slots import in_whole_groups
from tests.random_plans import random_plan
from tests.schedule_model import Entry, Outcome, run

DEPTHS = (1, 2, 4, 8)
ENDS_WELL = Outcome([], [])


def _entries(plan: Plan) -> list[list[Entry]]:
    """As the runtime reads them: rank by rank."""
    return [
        [batch.ring and batch.ring.ranks for batch in plan.micro_batches(rank)]
        for rank in range(plan.num_ranks)
    ]


def _request(rng: np.random.RandomState) -> StepRequest:
    lengths = np.minimum(rng.lognormal(4.0, 1.2, rng.randint(1, 40)).astype(int) + 1, 512)
    return StepRequest(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_end(seed):
    """300 valid plans a seed, at each depth: no wait cycle, no transfer meets another's."""
    rng = np.random.RandomState(seed)
    unequal = 0
    for _ in range(300):
        plan = random_plan(_request(rng), int(rng.randint(1, 9)), rng)
        entries = _entries(plan)
        unequal += len({len(own) for own in entries}) > 1
        plan.validate(pipeline_depth=2)
        for depth in DEPTHS:
            assert run(entries, depth) == ENDS_WELL, (entries, depth)
    assert unequal > 100


PIPELINES = [(p, v, g) for p, g in ((2, 2), (2, 3), (4, 4), (8, 8)) for v in (2, 3)]
"""(stages, model chunks, micro-batches per group)."""


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_end_under_the_interleaved_schedule(seed):
    rng = np.random.RandomState(seed)
    added = 0
    for _ in range(100):
        plan = random_plan(_request(rng), int(rng.randint(1, 9)), rng)
        for depth, chunks, group in PIPELINES:
            padded = in_whole_groups(plan, group)
            padded.validate(slot_group=group)
            added += int((padded.micro_batch_counts - plan.micro_batch_counts).sum())
            entries = _entries(padded)
            assert run(entries, depth, chunks, group) == ENDS_WELL, (entries, depth, chunks, group)
    assert added > 1000


def test_unequal_slots_are_refused_for_interleaved_stages():
    rng = np.random.RandomState(1)
    plans = (random_plan(_request(rng), 4, rng) for _ in range(100))
    plan = next(plan for plan in plans if len(set(plan.micro_batch_counts.tolist())) > 1)
    with pytest.raises(PlanError, match="where all need equal"):
        plan.validate(slot_group=2)
    with pytest.raises(PlanError, match="no multiple of 7"):
        in_whole_groups(plan, 2).validate(slot_group=7)


def test_random_plans_of_ranks_that_share_experts_end():
    """200 plans at each depth: rings over groups that exchange tokens in every layer."""
    rng = np.random.RandomState(11)
    rings = 0
    for _ in range(200):
        experts = int(rng.choice([2, 4]))
        plan = random_plan(_request(rng), experts * int(rng.randint(1, 3)), rng)
        plan = replace(plan, micro_batch_counts=equal_counts(plan.micro_batch_counts, experts))
        plan.validate(pipeline_depth=2, expert_ranks=experts)
        rings += plan.num_rings
        for depth in DEPTHS:
            assert run(_entries(plan), depth, experts=experts) == ENDS_WELL, (plan, depth)
    assert rings > 200


def test_the_model_finds_an_exchange_in_another_order():
    crossed: list[list[Entry]] = [[(0, 2), None], [None, (1, 3)], [None, (0, 2)], [(1, 3), None]]
    assert run(crossed, 1) == ENDS_WELL
    assert run(crossed, 1, experts=2) != ENDS_WELL
    assert run([[None], [None, None]], 1, experts=2) != ENDS_WELL


@pytest.mark.parametrize("strategy", ["auto", "dp-balance", "pp-balance", "naive"])
def test_plans_of_every_strategy_end(strategy):
    rng = np.random.RandomState(7)
    for _ in range(12):
        request, ranks = _request(rng), int(rng.choice([2, 3, 5, 8]))
        for depth in DEPTHS:
            config = PlannerConfig(
                num_ranks=ranks, capacity=-(-512 // ranks), strategy=strategy, pipeline_depth=depth
            )
            assert run(_entries(plan_step(config, request)), depth) == ENDS_WELL


SHIFTED: list[list[Entry]] = [[(0, 1), None, (1, 0)], [(0, 1), (1, 0)]]
"""The known-bad plan: both members meet in the same order, but the second ring is in slot 2 of
rank 0 and in slot 1 of rank 1."""


def test_the_shifted_slot_ends_only_without_pipeline_stages():
    assert run(SHIFTED, 1) == ENDS_WELL
    for depth in DEPTHS[1:]:
        assert run(SHIFTED, depth) != ENDS_WELL
    padded = [[*SHIFTED[0], None], [*SHIFTED[1], None, None]]
    assert run(padded, 2, chunks=2, group=2) != ENDS_WELL


def test_the_model_finds_what_shifted_slots_do():
    """Same relative order, random slots: fine without stages, often fatal with them."""
    rng = np.random.RandomState(3)
    bad = dict.fromkeys(DEPTHS, 0)
    for _ in range(100):
        rings = [tuple(int(r) for r in rng.permutation(4)[: rng.randint(2, 5)]) for _ in range(5)]
        entries: list[list[Entry]] = []
        for rank in range(4):
            own: list[Entry] = [ring for ring in rings if rank in ring]
            for _ in range(rng.randint(0, 4)):
                own.insert(rng.randint(len(own) + 1), None)
            entries.append(own or [None])
        for depth in DEPTHS:
            bad[depth] += run(entries, depth) != ENDS_WELL
    assert bad[1] == 0
    assert min(bad[2], bad[4], bad[8]) > 30
