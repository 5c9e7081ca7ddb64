# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto`: ours, the default. Minimises the predicted step time under the memory cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.degrees import copies_are_hidden, most_room, with_needed_offload
from megatron_hdp.planning.laminar import plan_laminar
from megatron_hdp.planning.naive import plan_naive
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.values import Plan, PlanError
from megatron_hdp.planning.waves import plan_waves


def plan_auto(config: PlannerConfig, request: StepRequest) -> Plan:
    """The fastest of ours, of ours with rings narrowed by offload, and of the paper's rule."""
    cost, depth = config.cost(), config.pipeline_depth
    plan = with_needed_offload(_structured(config, request), config)
    step_s = replay(plan, cost, depth).step_s
    simple = len(request.lengths) > _SMALL and depth == 1 and config.expert_ranks == 1
    # No plan without offload beats the bound, so the paper's rule could gain a percent at most.
    if simple and not config.offload and step_s <= _NEAR * plan.lower_bound_s:
        return plan
    for tried in (*_narrowed(config, request), *_paper(config, request)):
        tried_s = replay(tried, cost, depth).step_s
        if tried_s < step_s * (_WORTH_COPIES if tried.strategy == "auto" else 1.0):
            plan, step_s = tried, tried_s
    return plan


def _structured(config: PlannerConfig, request: StepRequest) -> Plan:
    """Nested blocks where ranks only meet in rings; waves where slots matter.

    Slots matter under pipeline stages, and where ranks meet inside a layer (equal slots).
    """
    if config.pipeline_depth > 1:
        return plan_waves(config, request)
    if config.expert_ranks == 1:
        return plan_laminar(config, request)
    tried = (plan_laminar(config, request), plan_waves(config, request))
    return min(tried, key=lambda plan: replay(plan, config.cost()).step_s)


def _narrowed(config: PlannerConfig, request: StepRequest) -> Iterator[Plan]:
    """Ours with members that hold more than the capacity, the rest of it on the host.

    Only where the copies hide behind compute and fit the host: the replay does not know them.
    """
    most = most_room(config)
    if int(np.max(request.lengths)) <= config.capacity:
        return
    for factor in _ROOMS:
        room = int(factor * config.capacity)
        if room <= most:
            plan = _structured(replace(config, ring_room=room), request)
            plan = with_needed_offload(plan, config)
            if copies_are_hidden(plan, config):
                yield plan


def _paper(config: PlannerConfig, request: StepRequest) -> Iterator[Plan]:
    """The paper's rule; where it offloads more than copies or host allow, or at all, also without.

    The paper's Eq. 3 knows no limit of the host's memory.
    """
    for tried in (config, replace(config, offload=False)):
        try:
            naive = plan_naive(tried, request)
            naive.validate(pipeline_depth=config.pipeline_depth, expert_ranks=config.expert_ranks)
        except PlanError:  # the paper's rule can ask for more ranks than there are
            return
        if copies_are_hidden(naive, config):
            yield naive
        if not naive.offload_ratios.any():
            return


_SMALL = 64
"""Sequences up to which a step is small enough for chance to favour the simple rule."""
_NEAR = 1.01
"""A larger step this near its bound is not compared: naive would take as long to make."""
_ROOMS = (1.5, 2.0)
"""Capacities' worth of tokens of a ring's member that are tried with offload."""
_WORTH_COPIES = 0.99
"""Offload is used for a step this much shorter, or less: copies are not free of risk."""
