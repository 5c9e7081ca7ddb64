# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Gives the data iterator its plans, from the options of a Megatron launch line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

from megatron_hdp import cpu
from megatron_hdp.data.loading.local import Planner
from megatron_hdp.data.requests import StepRequests
from megatron_hdp.planning import Plan, PlannerConfig, StepRequest, plan_step, predict_step
from megatron_hdp.planning.activations import attention_recomputed, saved_bytes
from megatron_hdp.planning.ahead import PlanAhead
from megatron_hdp.runtime.cross_entropy.choice import choose_loss
from megatron_hdp.runtime.device_memory import device_memory
from megatron_hdp.runtime.model_shape import model_shape, split_heads, windows
from megatron_hdp.runtime.moe.support import exchange_bytes, expert_ranks
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.pipeline import slots_per_group
from megatron_hdp.runtime.validation import capacity_of


def planner_config(args: Namespace, options: HdpOptions, num_ranks: int) -> PlannerConfig:
    """The planner's options; `args` are Megatron's, after validation."""
    shape, tensor_parallel = model_shape(args), args.tensor_model_parallel_size
    slot_group, heads = slots_per_group(args), split_heads(args)
    loss_share, recomputed_share = _unmoved_shares(args, options)
    return PlannerConfig(
        num_ranks=num_ranks,
        capacity=capacity_of(args),
        strategy=options.strategy,
        context_parallel_size=args.context_parallel_size,
        pipeline_depth=args.pipeline_model_parallel_size,
        cost_model=options.profile or ("cpu-estimate" if cpu.is_installed() else "h100-estimate"),
        expert_ranks=expert_ranks(args, num_ranks),
        exchange_bytes=exchange_bytes(args),
        slot_group=slot_group,
        tensor_parallel=tensor_parallel,
        layers_per_stage=shape.num_layers,
        activation_bytes=saved_bytes(shape) * tensor_parallel,
        loss_share=loss_share,
        recomputed_share=recomputed_share,
        windows=windows(args),
        offload=options.offload,
        offload_ratio=options.offload_ratio,
        host_memory=options.host_memory * 2**30,
        heads=heads and replace(heads, recomputed=attention_recomputed(shape)),
    )


def _unmoved_shares(args: Namespace, options: HdpOptions) -> tuple[float, float]:
    """Of the loss and of what is recomputed, which offload cannot move; without it nobody asks."""
    if not options.offload:
        return 0.0, 0.0
    memory = device_memory(options, args)
    return memory.loss_share(choose_loss(options, args).mode), memory.recomputed_share


class PlanInPlace:
    """Plans in the thread that asks."""

    def __init__(self, config: PlannerConfig, request: Callable[[int], StepRequest]) -> None:
        self._config = config
        self._request = request

    def get(self, step: int) -> Plan:
        return predict_step(self._config, plan_step(self._config, self._request(step)))

    def close(self) -> None: ...


def make_planner(config: PlannerConfig, requests: StepRequests, options: HdpOptions) -> Planner:
    """A planner that works ahead in a process of its own, or in place with --hdp-plan-ahead 0."""
    if options.plan_ahead == 0:
        return PlanInPlace(config, requests)
    timeout_s = 60 * options.timeout_minutes
    return PlanAhead(config, requests, requests.has, options.plan_ahead, timeout_s)
