# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One function makes every plan; it is checked before anyone sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_hdp.planning.auto import plan_auto
from megatron_hdp.planning.balance import plan_dp_balance, plan_pp_balance
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.naive import plan_naive
from megatron_hdp.planning.replay import micro_batch_s
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
    plan = replace(plan, predicted_s=micro_batch_s(plan, config.cost()))
    plan.validate(
        ids=request.ids,
        lengths=request.lengths,
        pipeline_depth=config.pipeline_depth,
        equal_slots=config.equal_slots,
    )
    return plan
