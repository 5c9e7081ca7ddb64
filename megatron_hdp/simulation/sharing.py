# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which links the tasks of a plan use: network cards of nodes, host links of nodes.

GPUs fill nodes in Megatron's order: tensor parallel innermost, then the HDP domain, pipeline
stages outermost.
"""

from __future__ import annotations

import numpy as np

from megatron_hdp.planning.values import Plan
from megatron_hdp.simulation.cluster import Cluster
from megatron_hdp.simulation.links import Floats, Ints, Traffic
from megatron_hdp.simulation.order import Operations
from megatron_hdp.simulation.work import Work, ring_micro_batches


class Nodes:
    """Where every stage of every HDP rank is."""

    def __init__(self, plan: Plan, cluster: Cluster, tensor_parallel: int, depth: int) -> None:
        places = np.arange(depth * plan.num_ranks).reshape(depth, plan.num_ranks)
        self.place = places
        """[p, N] number of a stage of a rank."""
        self.of = places * tensor_parallel // cluster.gpus_per_node
        """[p, N] node of its first GPU."""
        self.count = int(self.of[-1, -1]) + 1


def network_traffic(
    plan: Plan, work: Work, operations: Operations, nodes: Nodes, cluster: Cluster, share: float
) -> Traffic:
    """Hops between nodes, out of one (links 0 .. n-1) and into the next (links n .. 2n-1).

    Args:
        share: forward's part of a hop's bytes.
    """
    depth, units = operations.depth, operations.units
    unit = operations.unit_of[ring_micro_batches(plan)]
    following = np.arange(len(plan.ring_ranks)) + 1
    following[plan.ring_offsets[1:] - 1] = plan.ring_offsets[:-1]
    source, target = plan.ring_ranks, plan.ring_ranks[following]
    hop = np.zeros(units)
    np.maximum.at(hop, operations.unit_of, work.hop_bytes)
    parts: list[tuple[Ints, Ints, Ints]] = []
    for phase in range(2):
        for stage in range(depth):
            leaves = np.flatnonzero(nodes.of[stage, source] != nodes.of[stage, target])
            task = (phase * depth + stage) * units + unit[leaves]
            for ranks, offset in ((source, 0), (target, nodes.count)):
                mine = ranks[leaves]
                parts.append((task, offset + nodes.of[stage, mine], nodes.place[stage, mine]))
    capacity = cluster.nics_per_node * cluster.nic_bytes_s
    return _traffic(parts, _by_phase(hop / depth, depth, share), np.full(2 * nodes.count, capacity))


def host_traffic(
    plan: Plan, work: Work, operations: Operations, nodes: Nodes, cluster: Cluster,
    tensor_parallel: int,
) -> Traffic:  # fmt: skip
    """Copies to the host in forward (links 0 .. n-1), back in backward (links n .. 2n-1)."""
    depth, units = operations.depth, operations.units
    copied = np.zeros(units)
    np.maximum.at(copied, operations.unit_of, work.copy_bytes * tensor_parallel)
    moving = np.flatnonzero(work.copy_bytes > 0)
    rank = np.repeat(np.arange(plan.num_ranks), plan.micro_batch_counts)[moving]
    parts = [
        (
            (phase * depth + stage) * units + operations.unit_of[moving],
            phase * nodes.count + nodes.of[stage, rank],
            nodes.place[stage, rank],
        )
        for phase in range(2)
        for stage in range(depth)
    ]
    capacity = np.full(2 * nodes.count, cluster.host_bytes_s)
    return _traffic(parts, np.tile(copied, 2 * depth), capacity)


def core_traffic(
    plan: Plan, seconds: Floats, operations: Operations, nodes: Nodes, cluster: Cluster
) -> Traffic:
    """CPU cores of a node as a link: a running micro-batch takes one, or a fair part of one.

    Args:
        seconds: [T] of every task, with cores to spare.
    """
    rank = np.repeat(np.arange(plan.num_ranks), plan.micro_batch_counts)
    parts = [
        (
            (phase * operations.depth + stage) * operations.units + operations.unit_of,
            nodes.of[stage, rank],
            nodes.place[stage, rank],
        )
        for phase in range(2)
        for stage in range(operations.depth)
    ]
    return _traffic(parts, seconds, np.full(nodes.count, float(cluster.cores_per_node)))


def _by_phase(of_unit: Floats, depth: int, share: float) -> Floats:
    return np.concatenate((np.tile(share * of_unit, depth), np.tile((1 - share) * of_unit, depth)))


def _traffic(parts: list[tuple[Ints, Ints, Ints]], edge_bytes: Floats, capacity: Floats) -> Traffic:
    task, link, place = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Traffic(task, link, place, edge_bytes, capacity)
