# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""From sequence lengths to a plan: values, cost model, planners, validation. NumPy only."""

from __future__ import annotations

from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.planner import STRATEGIES, plan_step, predict_step
from megatron_hdp.planning.values import (
    MicroBatch,
    Plan,
    PlanDigest,
    PlanError,
    Ring,
    Sequence,
)

__all__ = [
    "STRATEGIES",
    "MicroBatch",
    "Plan",
    "PlanDigest",
    "PlanError",
    "PlannerConfig",
    "Ring",
    "Sequence",
    "StepRequest",
    "plan_step",
    "predict_step",
]
