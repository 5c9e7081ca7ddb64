# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What would HDP give? Plans the same steps by every strategy, simulates each, compares."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.planning import Plan, PlanError, PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.simulation.cluster import Cluster
from megatron_hdp.simulation.step import Job, Simulation, simulate

_LONGEST_OFFLOADED = 0.12
"""Eq. 3 may leave one sequence this share of the step, of which it makes many times the step."""


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, and how it is cut."""

    cost: CostModel
    """With its tensor-parallel size."""
    cluster: Cluster
    num_ranks: int
    pipeline_depth: int
    context: int
    capacity: int
    parameters: float = 0.0
    boundary_bytes: float = 0.0

    @property
    def static_context_parallel(self) -> int:
        """The smallest static CP that holds the context: the paper's baseline.

        Raises:
            PlanError: the domain is too small for it.
        """
        needed = -(-self.context // self.capacity)
        for size in range(needed, self.num_ranks + 1):
            if self.num_ranks % size == 0:
                return size
        raise PlanError(
            f"a context of {self.context} tokens does not fit {self.num_ranks} ranks of capacity "
            f"{self.capacity}: more GPUs, more capacity, or a shorter context"
        )

    @property
    def job(self) -> Job:
        return Job(self.cost, self.pipeline_depth, self.parameters, self.boundary_bytes)

    def planner(self, strategy: str, request: StepRequest) -> PlannerConfig:
        """Options of a strategy; `naive+offload` is naive with Eq. 3 under a time limit."""
        name, offload, _ = strategy.partition("+offload")
        cost = self.cluster.links_into(self.cost)
        work = float(cost.local_s(np.asarray(request.lengths)).sum()) / self.num_ranks
        return PlannerConfig(
            num_ranks=self.num_ranks,
            capacity=self.capacity,
            strategy=name,
            context_parallel_size=self.static_context_parallel,
            pipeline_depth=self.pipeline_depth,
            cost_model=cost,
            expert_ranks=cost.expert_ranks,
            tensor_parallel=cost.tensor_parallel,
            offload=bool(offload),
            offload_limit_s=_LONGEST_OFFLOADED * work,
        )

    @property
    def balance(self) -> str:
        """The paper's balancing strategy for this setting."""
        return "dp-balance" if self.pipeline_depth == 1 else "pp-balance"


@dataclass(frozen=True)
class Run:
    """One strategy's steps."""

    plans: tuple[Plan, ...]
    simulations: tuple[Simulation, ...]
    planner_s: float
    """CPU seconds per plan here, mean."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return float(np.mean([simulation.step_s for simulation in self.simulations]))

    def as_dict(self) -> dict[str, Any]:
        """Means over the steps; memory is the largest."""
        tokens = float(np.mean([plan.num_tokens for plan in self.plans]))
        shares = [simulation.shares() for simulation in self.simulations]
        busy = [simulation.busy_s.sum(0) for simulation in self.simulations]
        counts = [plan.micro_batch_counts for plan in self.plans]
        return {
            "step_s": self.step_s,
            "tokens_per_s": tokens / self.step_s,
            "shares": {key: float(np.mean([s[key] for s in shares])) for key in shares[0]},
            "busy_max_over_min": float(np.mean([b.max() / max(b.min(), 1e-12) for b in busy])),
            "busy_max_over_mean": float(np.mean([b.max() / b.mean() for b in busy])),
            "ring_bytes": float(np.mean([s.ring_bytes.sum() for s in self.simulations])),
            "network_bytes": float(np.mean([s.network_bytes.sum() for s in self.simulations])),
            "micro_batches": [int(min(c.min() for c in counts)), int(max(c.max() for c in counts))],
            "activation_peak_bytes": float(
                max(s.activation_peak_bytes.max() for s in self.simulations)
            ),
            "host_peak_bytes": float(max(s.host_peak_bytes.max() for s in self.simulations)),
            "planner_cpu_ms": 1000 * self.planner_s,
        }


def run_strategy(setting: Setting, strategy: str, requests: list[StepRequest]) -> Run:
    """Plans and simulates every step.

    Raises:
        PlanError: a step cannot be planned.
    """
    plans, simulations, spent = [], [], 0.0
    for request in requests:
        config = setting.planner(strategy, request)
        begun = time.process_time()
        plan = plan_step(config, request)
        spent += time.process_time() - begun
        plans.append(plan)
        simulations.append(simulate(plan, setting.job, setting.cluster))
    return Run(tuple(plans), tuple(simulations), spent / len(requests))


def ablation_strategies(setting: Setting) -> dict[str, str]:
    """The strategy behind every step of the paper's ablation, and ours."""
    balance = f"{setting.balance}+offload"
    return {
        "static": "static",
        "dynamic": "naive",
        "offload": "naive+offload",
        "balance": balance,
        "loader": balance,
        "auto": "auto",
    }


def ablation(setting: Setting, runs: dict[str, Run]) -> dict[str, float]:
    """Speedups over static, in the paper's order: each adds one thing to the one before.

    Up to `balance` every process reads the whole global batch before a step (the paper's SPMD
    loader); from `loader` on plans and tokens are ready when a step begins.
    """
    names = ablation_strategies(setting)
    tokens = np.mean([plan.num_tokens for plan in runs["static"].plans])
    loading = float(tokens) / setting.cluster.loader_tokens_s
    base = runs["static"].step_s + loading
    return {
        key: base / (runs[name].step_s + (0.0 if key in ("loader", "auto") else loading))
        for key, name in names.items()
        if name in runs and key != "static"
    }


def make_setting(
    cost: CostModel, cluster: Cluster, *, gpus: int, pipeline_depth: int, context: int,
    capacity: int, parameters: float = 0.0, boundary_bytes: float = 0.0,
) -> Setting:  # fmt: skip
    """A setting on `gpus` GPUs.

    Raises:
        PlanError: the GPUs cannot be cut so.
    """
    width = cost.tensor_parallel * pipeline_depth
    if gpus % width:
        raise PlanError(
            f"{gpus} GPUs are no multiple of {cost.tensor_parallel} tensor-parallel x "
            f"{pipeline_depth} pipeline stages: change one of them"
        )
    if cost.layers % pipeline_depth:
        raise PlanError(f"{cost.layers} layers are no multiple of {pipeline_depth} stages")
    if gpus // width % cost.expert_ranks:
        raise PlanError(
            f"{gpus // width} HDP ranks are no multiple of {cost.expert_ranks} ranks that share "
            f"experts: change --expert-parallel or the number of GPUs"
        )
    return Setting(
        cost, cluster, gpus // width, pipeline_depth, context, capacity, parameters,
        boundary_bytes,
    )  # fmt: skip
