# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto`: ours, the default. Minimises the predicted step time under the memory cap."""

from __future__ import annotations

from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.degrees import with_needed_offload
from megatron_hdp.planning.laminar import plan_laminar
from megatron_hdp.planning.naive import plan_naive
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.values import Plan, PlanError
from megatron_hdp.planning.waves import plan_waves


def plan_auto(config: PlannerConfig, request: StepRequest) -> Plan:
    """Nested blocks where ranks only meet in rings; waves where slots matter; never over naive.

    Slots matter under pipeline stages, and where ranks meet inside a layer (equal slots).
    """
    cost, depth = config.cost(), config.pipeline_depth
    if depth > 1:
        plan = plan_waves(config, request)
    elif config.expert_ranks == 1:
        plan = plan_laminar(config, request)
    else:
        tried = (plan_laminar(config, request), plan_waves(config, request))
        plan = min(tried, key=lambda plan: replay(plan, cost).step_s)
    plan = with_needed_offload(plan, config)
    simple = len(request.lengths) > _SMALL and depth == 1 and config.expert_ranks == 1
    step_s = replay(plan, cost, depth).step_s
    # No plan without offload beats the bound, so the paper's rule could gain a percent at most.
    if simple and not config.offload and step_s <= _NEAR * plan.lower_bound_s:
        return plan
    try:
        naive = plan_naive(config, request)
        naive.validate()
    except PlanError:  # the paper's rule can ask for more ranks than there are
        return plan
    better = replay(naive, cost, depth).step_s < step_s
    return naive if better else plan


_SMALL = 64
"""Sequences up to which a step is small enough for chance to favour the simple rule."""
_NEAR = 1.01
"""A larger step this near its bound is not compared: naive would take as long to make."""
