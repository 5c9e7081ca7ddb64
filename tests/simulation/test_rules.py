"""What holds for every plan: equality with the planner's replay, conservation, fair sharing."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planning import PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.replay import replay
from megatron_hdp.simulation import Cluster, Job, ModelShape, simulate
from megatron_hdp.simulation.cluster import presets
from megatron_hdp.simulation.links import fair_rates
from tests.simulation.helpers import plan_of

STRATEGIES = ("auto", "naive", "dp-balance", "pp-balance")


def _plan(strategy, depth, ranks=24, data="byted", seed=5, **options):
    config = PlannerConfig(ranks, 8192, strategy, pipeline_depth=depth, **options)
    lengths = draw(data, 6 * ranks * 8192, ranks * 8192, seed)
    return config, plan_step(config, StepRequest(np.arange(len(lengths)), lengths))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_the_replay_where_nothing_is_shared(strategy, depth):
    config, plan = _plan(strategy, depth)
    wanted = replay(plan, config.cost(), depth)
    found = simulate(plan, Job(config.cost(), depth), Cluster.of(config.cost()))
    assert found.step_s == pytest.approx(wanted.step_s, rel=1e-12)
    for ours, theirs in ((found.forward, wanted.forward), (found.backward, wanted.backward)):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cards", [8, 1])
@pytest.mark.parametrize("depth", [1, 4])
def test_time_and_bytes_are_conserved(depth, cards):
    config, plan = _plan("naive", depth, offload=True, offload_limit_s=10.0)
    cost = config.cost()
    assert plan.offload_ratios.max() > 0
    cluster = replace(Cluster.of(cost), nics_per_node=cards, host_bytes_s=1e11)
    job = Job(cost, depth, parameters=7e9, boundary_bytes=8192, loading_s=0.5)
    found = simulate(plan, job, cluster)
    parts = found.busy_s + found.ring_wait_s + found.pipeline_bubble_s + found.data_bubble_s
    whole = parts + found.loading_s + found.sync_s
    np.testing.assert_allclose(whole, found.step_s, rtol=1e-9)
    assert sum(found.shares().values()) == pytest.approx(1.0)
    for part in (found.ring_wait_s, found.pipeline_bubble_s, found.data_bubble_s):
        assert part.min() > -1e-9
    assert (found.busy_s >= found.compute_s - 1e-9).all()

    on_ring = plan.ring_of >= 0
    hops = plan.lengths[on_ring] * (plan.ring_sizes[plan.ring_of[on_ring]] - 1)
    assert found.ring_bytes.sum() == pytest.approx(hops.sum() * cost.layers * cost.ring_bytes)
    assert 0 < found.network_bytes.sum() <= found.ring_bytes.sum() * (1 + 1e-12)
    layers = cost.layers / depth - 2
    copied = plan.offload_ratios * plan.micro_batch_tokens * cost.activation_bytes * layers * depth
    # members of a ring hold equal shards up to a token
    assert found.host_bytes.sum() == pytest.approx(copied.sum(), rel=1e-3)


def test_fewer_cards_never_speed_a_step_up_and_leave_the_work():
    cost = PlannerConfig(16, 8192).cost()
    rings = [((rank, rank + 8), rank % 3, 4000 * (rank + 1)) for rank in range(8)]
    plan = plan_of(16, rings, [(rank, 3, 5000) for rank in range(16)])
    steps, work = [], []
    for cards in (8, 4, 2, 1):
        slow = replace(Cluster.of(cost), nics_per_node=cards, nic_bytes_s=4e9)
        found = simulate(plan, Job(cost), slow)
        steps.append(found.step_s)
        work.append(found.compute_s.sum())
    assert steps == sorted(steps)
    assert steps[-1] > 1.25 * steps[0]
    assert max(work) == min(work)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_fair_rates_are_max_min(data):
    flows, links = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    demand = np.array(data.draw(st.lists(st.floats(0.1, 10), min_size=flows, max_size=flows)))
    capacity = np.array(data.draw(st.lists(st.floats(0.5, 20), min_size=links, max_size=links)))
    uses = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=flows * links, max_size=flows * links))
    ).reshape(flows, links)
    flow, link = np.nonzero(uses)
    rates = fair_rates(demand, flow, link, uses[flow, link].astype(float), capacity)
    load = rates @ uses
    assert (rates <= demand * (1 + 1e-9)).all()
    assert (load <= capacity * (1 + 1e-9)).all()
    for f in range(flows):
        full = [
            j for j in range(links)
            if uses[f, j] and load[j] >= capacity[j] * (1 - 1e-9)
            and all(rates[g] <= rates[f] * (1 + 1e-9) for g in range(flows) if uses[g, j])
        ]  # fmt: skip
        assert rates[f] >= demand[f] * (1 - 1e-9) or full, "neither satisfied nor held up"


@pytest.mark.parametrize("name", presets("models"))
def test_models_have_their_parameters(name):
    # published sizes, less the keys and values that 8 groups save over full attention
    billions = {
        "llama-7b": 6.74 - 32 * 2 * 4096 * 3072 / 1e9,
        "llama-13b": 13.02 - 40 * 2 * 5120 * 4096 / 1e9,
        "llama-30b": 32.53 - 60 * 2 * 6656 * (2 * 6656 - 128 * 64) / 1e9,
        "llama-70b": 68.98, "mistral-8x7b": 46.7, "mistral-8x22b": 140.6,
    }  # fmt: skip
    assert ModelShape.load(name).parameters / 1e9 == pytest.approx(billions[name], rel=0.002)


@pytest.mark.slow
def test_a_step_of_12288_gpus_takes_seconds():
    cluster = Cluster.load("h100-estimate")
    model = ModelShape.load("llama-7b")
    cost = model.cost_model(cluster, 1)
    config = PlannerConfig(12288, 8192, "naive", cost_model=cost)
    lengths = draw("byted", 4 * 12288 * 8192, 2**21, 3)
    plan = plan_step(config, StepRequest(np.arange(len(lengths)), lengths))
    begun = time.process_time()
    found = simulate(plan, Job(cost), replace(cluster, nics_per_node=4))
    assert time.process_time() - begun < 30
    assert (found.busy_s <= found.step_s).all()
