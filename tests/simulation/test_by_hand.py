"""Cases that can be solved on paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.simulation import Cluster, DeadlockError, Job, simulate
from megatron_hdp.simulation.engine import Tasks, run
from tests.simulation.helpers import COST, cluster, plan_of

S = 1000  # local: 2 layers x (1e-6 S^2 + 1e-3 S) + 0.5 = 4.5 s


@pytest.mark.parametrize(
    ("bandwidth", "overlap", "expected"),
    [
        # half the tokens: linear 1.0; two ring steps of 2 x 1e-6 x 500^2 = 0.5 each; fixed 0.5
        (1e12, 1.0, 2.5),
        # one hop of 2 layers x 100 B x 500 tokens = 100 kB: 1 s at 100 kB/s, longer than 0.5
        (1e5, 1.0, 3.0),
        (1e5, 0.0, 3.5),
        (1e5, 0.5, 3.25),
    ],
)
def test_two_ranks_one_ring(bandwidth, overlap, expected):
    cost = replace(COST, inside_bytes_s=bandwidth)
    plan = plan_of(2, rings=[((0, 1), 0, S)])
    found = simulate(plan, Job(cost), cluster(cost, ring_overlap=overlap))
    assert found.step_s == pytest.approx(expected, rel=1e-12)
    assert found.compute_s[0] == pytest.approx([2.5, 2.5], rel=1e-12)
    assert found.ring_bytes.sum() == pytest.approx(2 * 2 * 100 * 500)
    assert found.network_bytes.sum() == 0


def test_a_ring_waits_for_its_slowest_member_and_others_wait_at_the_end():
    plan = plan_of(3, rings=[((0, 1), 1, S)], local=[(0, 0, S), (1, 0, 500), (2, 0, 500)])
    found = simulate(plan, Job(COST), cluster())
    # local: 4.5 s and 2 x (0.25 + 0.5) + 0.5 = 2.0 s, then the ring's 2.5
    assert found.step_s == pytest.approx(7.0)
    assert found.ring_wait_s[0] == pytest.approx([0, 2.5, 0])
    assert found.data_bubble_s[0] == pytest.approx([0, 0, 5.0])
    assert found.pipeline_bubble_s[0] == pytest.approx([0, 0, 0], abs=1e-12)
    assert found.forward[0][0, :2, 1] == pytest.approx([4.5, 4.5])


def test_ranks_that_share_experts_wait_in_every_slot_and_pay_the_exchange():
    """Ranks 0 and 1 share experts, and so do 2 and 3, which have nothing long."""
    cost = COST.with_experts(2, exchange_bytes=1e9)  # 1e9 B / 2 x 1 other / 1e12 B/s = 0.5 ms
    local = [(0, 0, S), (1, 0, 500), (0, 1, 500), (1, 1, S), (2, 0, 500), (3, 0, 500)]
    plan = plan_of(4, local=local)
    found = simulate(plan, Job(cost), cluster(cost))
    # 2 layers x 0.5 ms x 1000 tokens = 1 s on top of 4.5 s, in both slots; 2.0 + 0.5 s apart
    assert found.step_s == pytest.approx(2 * 5.5)
    assert found.compute_s[0] == pytest.approx([8.0, 8.0, 2.5, 2.5])
    assert found.busy_s[0] == pytest.approx([11.0, 11.0, 2.5, 2.5])
    assert found.data_bubble_s[0] == pytest.approx([0, 0, 8.5, 8.5])


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 3), (4, 4), (4, 9)])
def test_bubble_of_1f1b(stages, micro_batches):
    plan = plan_of(1, local=[(0, k, S) for k in range(micro_batches)])
    found = simulate(plan, Job(COST, stages), cluster())
    part = 4.5 / stages
    assert found.step_s == pytest.approx((micro_batches + stages - 1) * part)
    assert found.pipeline_bubble_s[:, 0] == pytest.approx([(stages - 1) * part] * stages)
    assert found.data_bubble_s == pytest.approx(0)
    # a stage holds at most as many micro-batches as there are stages from it on
    held = [min(stages - j, micro_batches) for j in range(stages)]
    per_micro_batch = S * 10 * 2 / stages
    assert found.activation_peak_bytes[:, 0] == pytest.approx(np.array(held) * per_micro_batch)


def test_the_way_between_stages():
    plan = plan_of(1, local=[(0, 0, S)])
    found = simulate(plan, Job(COST, 3, boundary_bytes=2.0), cluster())
    assert found.step_s == pytest.approx(4.5 + 4 * S * 2 / 1e3)


CROSSING = [((0, 2), 0, S), ((1, 3), 0, S)]  # two nodes of two ranks
# alone: linear 1.0, fixed 0.5, first step 0.5, hop 100 kB at 50 kB/s = 2 s: 4.0 s, bytes 100 kB


def _slow(cards: float, across: float = 5e4):
    cost = replace(COST, across_bytes_s=across)
    return cost, cluster(cost, nics_per_node=2, nic_bytes_s=across * cards / 2)


def test_two_rings_with_a_card_each():
    cost = replace(COST, across_bytes_s=5e4)
    found = simulate(plan_of(4, CROSSING), Job(cost), cluster(cost))
    assert found.step_s == pytest.approx(4.0)


def test_two_rings_share_a_card():
    """Each moves 100 kB out of each node in 4 s, 25 kB/s; the card has 25 kB/s for both."""
    cost = replace(COST, across_bytes_s=5e4)
    shared = cluster(cost, nics_per_node=1, nic_bytes_s=5e4)
    found = simulate(plan_of(4, CROSSING), Job(cost), shared)
    assert found.step_s == pytest.approx(4.0)  # 2 x 25 kB/s just fit

    # linear and fixed nearly nothing: 2.5 s alone, 40 kB/s each, 80 over a card of 50
    dense = replace(cost, linear_s=1e-12, fixed_s=1e-12)
    found = simulate(plan_of(4, CROSSING), Job(dense), shared)
    assert found.step_s == pytest.approx(2 * 100e3 / 50e3)
    assert found.network_bytes == pytest.approx([200e3, 200e3])


def test_the_longer_ring_speeds_up_when_the_other_is_done():
    cost = replace(COST, across_bytes_s=5e4, linear_s=1e-12, fixed_s=1e-12, attention_s=1e-15)
    shared = cluster(cost, nics_per_node=1, nic_bytes_s=5e4)
    plan = plan_of(4, [((0, 2), 0, 3 * S), ((1, 3), 0, S)])
    found = simulate(plan, Job(cost), shared)
    # forward 75 and 25 kB, backward 225 and 75 kB, 25 kB/s each until the short ring ends at 4 s
    assert found.backward[1][0, :, 0] == pytest.approx([8.0, 4.0, 8.0, 4.0])


def test_ranks_of_a_node_share_the_way_to_the_host():
    """1000 tokens x 10 B x 2 of 4 layers = 20 kB at 10 kB/s: 2 s, against 1 s of forward."""
    cost = replace(COST, layers=4, attention_s=1e-15, fixed_s=1e-12, host_copy_bytes_s=1e4)
    plan = plan_of(2, local=[(0, 0, S), (1, 0, S)], ratios={(0, 0): 1.0, (1, 0): 1.0}, num_layers=4)
    alone = simulate(plan, Job(cost), cluster(cost, host_bytes_s=2e4))
    # forward 1 s of computing, backward 3 s
    assert alone.forward[1][0] == pytest.approx(np.array([[2.0], [2.0]]))
    assert alone.step_s == pytest.approx(5.0)
    shared = simulate(plan, Job(cost), cluster(cost, host_bytes_s=1e4))
    assert shared.forward[1][0] == pytest.approx(np.array([[4.0], [4.0]]))
    assert shared.step_s == pytest.approx(8.0)
    assert shared.host_bytes.sum() == pytest.approx(40e3)
    assert shared.host_peak_bytes[0] == pytest.approx([20e3, 20e3])
    assert shared.activation_peak_bytes[0] == pytest.approx([20e3, 20e3])


def test_ranks_on_a_cpu_share_its_cores():
    plan = plan_of(3, local=[(0, 0, S), (1, 0, S // 2), (2, 0, S // 2)])
    cost = replace(COST, attention_s=1e-15)  # 2.5 s for S, 1.5 s for half of it
    shared = cluster(cost, gpus_per_node=3, cores_per_node=2)
    found = simulate(plan, Job(cost), shared)
    # forward is a quarter: all at 2/3 of a core until the short ones end, then a core for the rest
    assert found.backward[1][0, 1:, 0] == pytest.approx([1.5 * 1.5] * 2)
    assert found.step_s == pytest.approx(1.5 * 1.5 + 1.0)
    assert simulate(plan, Job(cost), replace(shared, cores_per_node=3)).step_s == pytest.approx(2.5)


def test_gradient_synchronisation_and_loading_are_added():
    plan = plan_of(4, local=[(rank, 0, S) for rank in range(4)])
    slow = cluster(nic_bytes_s=100.0)
    found = simulate(plan, Job(COST, parameters=50.0, loading_s=2.0), slow)
    # 6 bytes x 50 parameters x 3/4 at 100 B/s
    assert found.sync_s == pytest.approx(2.25)
    assert found.step_s == pytest.approx(2.0 + 4.5 + 2.25)
    half = simulate(plan, Job(COST, parameters=50.0), replace(slow, gradient_overlap=0.5))
    assert half.sync_s == pytest.approx(1.125)


def test_a_cycle_is_named():
    ones = np.ones(2)
    cycle = Tasks(ones, np.array([0, 1]), np.array([1, 0]), np.zeros(2))
    with pytest.raises(DeadlockError, match="2 of 2 micro-batches"):
        run(cycle, [])


def test_a_cluster_refuses_what_cannot_be():
    from megatron_hdp.planning import PlanError

    with pytest.raises(PlanError, match="nic_bytes_s is 0: give a positive"):
        cluster(nic_bytes_s=0)
    with pytest.raises(PlanError, match="nowhere is neither a file nor one of bytescale-inferred"):
        Cluster.load("nowhere")
