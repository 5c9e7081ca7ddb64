# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One function makes every plan; it is checked before anyone sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_hdp.planning.auto import plan_auto
from megatron_hdp.planning.balance import plan_dp_balance, plan_pp_balance
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.degrees import with_given_ratio
from megatron_hdp.planning.head_parallel import with_head_degrees
from megatron_hdp.planning.naive import plan_naive
from megatron_hdp.planning.replay import micro_batch_s, replay
from megatron_hdp.planning.slots import in_whole_groups
from megatron_hdp.planning.static import plan_static
from megatron_hdp.planning.values import Plan, PlanError

Strategy = Callable[[PlannerConfig, StepRequest], Plan]

STRATEGIES: dict[str, Strategy] = {
    "auto": plan_auto,
    "dp-balance": plan_dp_balance,
    "pp-balance": plan_pp_balance,
    "static": plan_static,
    "naive": plan_naive,
}


def plan_step(config: PlannerConfig, request: StepRequest) -> Plan:
    """The plan of one step: deterministic in (config, request), and valid.

    Raises:
        PlanError: the strategy is not known, or the sequences do not fit.
    """
    strategy = STRATEGIES.get(config.strategy)
    if strategy is None:
        raise PlanError(
            f"--hdp-strategy {config.strategy} is not a strategy: "
            f"use one of {', '.join(STRATEGIES)}"
        )
    plan = strategy(config, request)
    if config.slot_group > 1:
        plan = in_whole_groups(plan, config.slot_group)
    plan = with_head_degrees(with_given_ratio(plan, config), config)
    plan = replace(plan, predicted_s=micro_batch_s(plan, config.cost()))
    plan.validate(
        ids=request.ids,
        lengths=request.lengths,
        pipeline_depth=config.pipeline_depth,
        expert_ranks=config.expert_ranks,
        slot_group=config.slot_group,
    )
    return plan


def predict_step(config: PlannerConfig, plan: Plan) -> Plan:
    """The plan with the step time that the event replay predicts.

    Apart from `plan_step`, since only those who show that time need the replay.
    """
    return replace(plan, predicted_step_s=replay(plan, config.cost(), config.pipeline_depth).step_s)
