"""Small clusters, cost models and plans with round numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.simulation import Cluster

COST = CostModel(
    name="round", source="test", date="2026-12-01", layers=2, attention_s=1e-6, linear_s=1e-3,
    fixed_s=0.5, forward_share=0.25, ring_bytes=100, latency_s=0.0, inside_bytes_s=1e12,
    across_bytes_s=1e3, ranks_per_node=2, activation_bytes=10, host_copy_bytes_s=1e9,
)  # fmt: skip


def cluster(cost: CostModel = COST, **changes) -> Cluster:
    return replace(Cluster.of(cost), **changes)


def plan_of(num_ranks: int, rings=(), local=(), capacity=10**6, ratios=None, num_layers=0):
    """rings: (ranks, slot, length); local: (rank, slot, length)."""
    lengths = np.array([item[2] for item in (*rings, *local)])
    builder = PlanBuilder(np.arange(len(lengths)), lengths, num_ranks, capacity)
    for i, (ranks, slot, _) in enumerate(rings):
        builder.add_ring(ranks, slot, [i])
    for i, (rank, slot, _) in enumerate(local, len(rings)):
        builder.add_local(rank, slot, [i])
    plan = builder.build(0, "by hand", ratios, num_layers)
    plan.validate()
    return plan
