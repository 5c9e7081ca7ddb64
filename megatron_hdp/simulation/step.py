# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Simulates one optimizer step of a plan on a cluster.

Resolution is the micro-batch: its layers are alike, so their times are multiplied, not stepped
through. What that leaves out is in docs/simulation.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.values import Plan, resident_fraction
from megatron_hdp.simulation.cluster import Cluster
from megatron_hdp.simulation.engine import Tasks, run
from megatron_hdp.simulation.links import Floats
from megatron_hdp.simulation.order import Operations, in_flight_peak
from megatron_hdp.simulation.sharing import Nodes, core_traffic, host_traffic, network_traffic
from megatron_hdp.simulation.work import Units, Work


@dataclass(frozen=True)
class Job:
    """What a step costs besides its plan."""

    cost: CostModel
    pipeline_depth: int = 1
    parameters: float = 0.0
    """Of the whole model; 0 leaves the gradient synchronisation out."""
    boundary_bytes: float = 0.0
    """Per token from a pipeline stage to the next; 0 makes stages touch without delay."""
    loading_s: float = 0.0
    """How long every rank waits for its plan and tokens before the step."""


@dataclass(frozen=True)
class Simulation:
    """One step. Times are seconds from its start; p stages, N HDP ranks, K slots.

    For every stage of every rank loading + busy + ring waits + pipeline bubble + data bubble +
    gradient synchronisation is the step.
    """

    step_s: float
    loading_s: float
    sync_s: float
    forward: tuple[Floats, Floats]
    """(start, end), each [p, N, K]; NaN past a rank's last slot."""
    backward: tuple[Floats, Floats]
    compute_s: Floats
    """[p, N] arithmetic and fixed cost."""
    busy_s: Floats
    """[p, N] in micro-batches: arithmetic, what it does not hide of transfers and copies, and, as
    ring members meet in every layer, local sequences behind another member's shards."""
    ring_wait_s: Floats
    """[p, N] ready, but a ring's other members were not."""
    pipeline_bubble_s: Floats
    """[p, N] waiting for a neighbouring stage: warm-up, cool-down, unequal micro-batches."""
    data_bubble_s: Floats
    """[p, N] done, while other ranks of the domain were not."""
    ring_bytes: Floats
    """[p, N] sent round rings."""
    network_bytes: Floats
    """[nodes] that rings sent out of every node."""
    host_bytes: Floats
    """[nodes] copied to the host; as much comes back."""
    activation_peak_bytes: Floats
    """[p, N] per GPU."""
    host_peak_bytes: Floats
    """[p, N] per GPU, on the host."""

    @property
    def waited_s(self) -> Floats:
        """[N] of the first stage: the step without its micro-batches."""
        result: Floats = self.step_s - self.busy_s[0]
        return result

    def shares(self) -> dict[str, float]:
        """Mean over all stages and ranks, as shares of the step."""
        parts = {
            "compute": self.compute_s,
            "exposed": self.busy_s - self.compute_s,
            "ring_wait": self.ring_wait_s,
            "pipeline_bubble": self.pipeline_bubble_s,
            "data_bubble": self.data_bubble_s,
            "gradient_sync": np.array(self.sync_s),
            "loading": np.array(self.loading_s),
        }
        return {name: float(value.mean()) / self.step_s for name, value in parts.items()}


def simulate(plan: Plan, job: Job, cluster: Cluster) -> Simulation:
    """Runs the step. The cost model's links are the cluster's (`Cluster.links_into`).

    Raises:
        DeadlockError: the plan's rings wait for each other in a cycle.
    """
    return _Step(plan, job, cluster).run()


class _Step:
    def __init__(self, plan: Plan, job: Job, cluster: Cluster) -> None:
        self.plan, self.job, self.cluster = plan, job, cluster
        self.depth = job.pipeline_depth
        self.cost = cluster.links_into(job.cost)
        self.units = Units.build(plan, self.cost.expert_ranks)
        self.work = Work.build(plan, self.cost, self.depth, cluster.ring_overlap)
        self.operations = Operations.build(plan, self.units, self.depth)
        self.nodes = Nodes(plan, cluster, self.cost.tensor_parallel, self.depth)
        self.rank = np.repeat(np.arange(plan.num_ranks), plan.micro_batch_counts)

    def run(self) -> Simulation:
        plan, depth, operations = self.plan, self.depth, self.operations
        network = network_traffic(
            plan, self.work, operations, self.nodes, self.cluster, self.cost.forward_share
        )
        host = host_traffic(
            plan, self.work, operations, self.nodes, self.cluster, self.cost.tensor_parallel
        )
        delay = self._stage_delay()
        tasks, shared = self._tasks(delay), [network, host]
        if self.cluster.cores_per_node:
            shared.append(core_traffic(plan, tasks.seconds, operations, self.nodes, self.cluster))
        start, end = run(tasks, shared)
        start, end = start[operations.tasks], end[operations.tasks]
        busy = self._per_place(end - start)
        ring_wait = self._per_place(start - operations.ready(end, delay))
        done = float(end.max())
        last = end.reshape(2, depth, -1)[1][:, plan.first_micro_batch[1:] - 1]
        rank_done = last.max(0)
        loading, sync = self.job.loading_s, self._sync_s()
        return Simulation(
            step_s=loading + done + sync,
            loading_s=loading,
            sync_s=sync,
            forward=(self._grid(loading + start, 0), self._grid(loading + end, 0)),
            backward=(self._grid(loading + start, 1), self._grid(loading + end, 1)),
            compute_s=self._every_stage(self.work.compute_s),
            busy_s=busy,
            ring_wait_s=ring_wait,
            pipeline_bubble_s=rank_done - busy - ring_wait,
            data_bubble_s=np.tile(done - rank_done, (depth, 1)),
            ring_bytes=self._every_stage(self.work.hop_bytes),
            network_bytes=network.bytes_by_link()[: self.nodes.count],
            host_bytes=host.bytes_by_link()[: self.nodes.count],
            activation_peak_bytes=self._activation_peak(),
            host_peak_bytes=in_flight_peak(self.work.copy_bytes, plan, depth),
        )

    def _tasks(self, delay: Floats) -> Tasks:
        copying = self.work.copy_bytes / self.cluster.host_copy_bytes_s
        share, phases = self.cost.forward_share, []
        for part in (share, 1 - share):
            seconds = np.maximum(part * self.work.alone_s / self.depth, copying)
            phases.append(np.tile(self.units.largest(seconds), self.depth))
        operations, tasks = self.operations, self.operations.tasks
        behind = np.flatnonzero(operations.previous >= 0)
        from_stage = np.flatnonzero(operations.neighbour >= 0)
        return Tasks(
            seconds=np.concatenate(phases),
            before=tasks[
                np.concatenate((operations.previous[behind], operations.neighbour[from_stage]))
            ],
            after=tasks[np.concatenate((behind, from_stage))],
            delay=np.concatenate((np.zeros(len(behind)), delay[from_stage])),
        )

    def _stage_delay(self) -> Floats:
        """[O] a micro-batch's way from the neighbouring stage, on a link of its own."""
        operations = 2 * self.depth
        if not self.job.boundary_bytes:
            return np.zeros(operations * len(self.rank))
        per_token = self.job.boundary_bytes / self.cost.tensor_parallel / self.cost.across_bytes_s
        return np.tile(self.cost.latency_s + self.plan.micro_batch_tokens * per_token, operations)

    def _sync_s(self) -> float:
        per_gpu = self.job.parameters / (self.cost.tensor_parallel * self.depth)
        return self.cluster.gradient_sync_s(self.plan.num_ranks, per_gpu)

    def _activation_peak(self) -> Floats:
        plan, layers = self.plan, self.cost.layers / self.depth
        saved = self.cost.activation_bytes / self.cost.tensor_parallel * layers
        of_micro_batch: Floats = saved * plan.micro_batch_tokens.astype(np.float64)
        if len(plan.offload_ratios):
            of_micro_batch = of_micro_batch * resident_fraction(plan.offload_ratios, round(layers))
        return in_flight_peak(of_micro_batch, plan, self.depth)

    def _every_stage(self, of_micro_batch: Floats) -> Floats:
        """[p, N] a rank's sum, an equal part on every stage."""
        total = np.bincount(self.rank, weights=of_micro_batch, minlength=self.plan.num_ranks)
        return np.tile(total / self.depth, (self.depth, 1))

    def _per_place(self, of_operation: Floats) -> Floats:
        """[p, N] sums over both phases."""
        both = of_operation.reshape(2, self.depth, -1).sum(0)
        return np.add.reduceat(both, self.plan.first_micro_batch[:-1], axis=1)

    def _grid(self, of_operation: Floats, phase: int) -> Floats:
        """[p, N, K] of one phase, NaN past a rank's last slot."""
        counts = self.plan.micro_batch_counts
        grid = np.full((self.depth, self.plan.num_ranks, int(counts.max())), np.nan)
        slot = np.arange(len(self.rank)) - self.plan.first_micro_batch[self.rank]
        grid[:, self.rank, slot] = of_operation.reshape(2, self.depth, -1)[phase]
        return grid
