# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How many ranks a sequence needs, and what share of its activations goes to the host (Eq. 3)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_hdp.planning.config import PlannerConfig
from megatron_hdp.planning.values import Plan, PlanError


class Degree(NamedTuple):
    """Ranks and offload ratio of one sequence."""

    ranks: int
    ratio: float


def solve_eq3(length: int, config: PlannerConfig) -> Degree:
    """ByteScale's Eq. 3 in closed form: the fewest ranks, with copies hidden behind compute.

    Per layer, T(s) is the forward time and Act(s) the saved bytes; D falls with r, so the largest
    hidden r = min(1, T(s) B / Act(s)) is best, unless it saves less than one rank's capacity, which
    is the paper's lower bound on r: then r = 0. Both T and Act are divided by D when sharded, so
    hiding does not depend on D.
    """
    plain = Degree(-(-length // config.capacity), 0.0)
    layers = layers_per_rank(config)
    if not config.offload or length <= config.capacity or layers <= 2:
        return plain
    cost = config.cost()
    forward = cost.forward_share * (cost.attention_s * length + cost.linear_s) * length
    activations = activation_bytes(config) * length
    ratio = min(1.0, forward * cost.host_copy_bytes_s / activations)
    if ratio < min(1.0, layers * config.capacity / ((layers - 2) * length)):
        return plain
    resident = (2 + (1 - ratio) * (layers - 2)) * length
    ranks = math.ceil(resident / (layers * config.capacity))
    if math.isinf(config.offload_limit_s):
        return Degree(ranks, ratio)
    return _in_time(length, Degree(ranks, ratio), plain.ranks, config)


def _in_time(length: int, degree: Degree, most: int, config: PlannerConfig) -> Degree:
    """Widened until the sequence keeps the limit, at most to what needs no offload.

    Eq. 3 minimises ranks; taken literally one long sequence becomes the whole step.
    """
    sizes = np.arange(degree.ranks, most + 1)
    seconds = config.cost().sequence_s(np.full(len(sizes), length), sizes)
    fitting = sizes[seconds <= config.offload_limit_s]
    ranks = int(fitting[0]) if len(fitting) else most
    layers = layers_per_rank(config)
    shard = math.ceil(length / ranks) + 1  # a member can hold a token more than the mean
    needed = (1 - config.capacity / shard) * layers / (layers - 2)
    return Degree(ranks, min(degree.ratio, max(0.0, needed)))


def host_bytes(length: int, degree: Degree, config: PlannerConfig) -> float:
    """Host bytes per rank that a sequence's offload holds: r (l-1) Act(s) / D.

    Of l layers all but the last one offload; the second that Eq. 3 counts as resident is one that
    is on its way.
    """
    saved = activation_bytes(config) / config.tensor_parallel * length
    return degree.ratio * (layers_per_rank(config) - 1) * saved / degree.ranks


def layers_per_rank(config: PlannerConfig) -> int:
    """Transformer layers of one pipeline stage."""
    return config.layers_per_stage or max(1, config.cost().layers // config.pipeline_depth)


def activation_bytes(config: PlannerConfig) -> float:
    """Bytes that a layer saves for backward, per token, over all TP ranks."""
    return config.activation_bytes or config.cost().activation_bytes


def with_needed_offload(plan: Plan, config: PlannerConfig) -> Plan:
    """The plan with the smallest ratio that brings each over-full micro-batch to the capacity."""
    layers = layers_per_rank(config)
    tokens = plan.micro_batch_tokens.astype(np.float64)
    if not config.offload or layers <= 2 or tokens.max() <= config.capacity:
        return plan
    ratios = (1 - config.capacity / np.maximum(tokens, config.capacity)) * layers / (layers - 2)
    return replace(plan, offload_ratios=np.minimum(ratios, 1.0), num_layers=layers)


def with_given_ratio(plan: Plan, config: PlannerConfig) -> Plan:
    """The plan with the config's own offload ratio in every micro-batch, where it has one."""
    if config.offload_ratio is None:
        return plan
    ratios = np.full(int(plan.micro_batch_counts.sum()), config.offload_ratio)
    return replace(plan, offload_ratios=ratios, num_layers=layers_per_rank(config))


def ratio_that_fits(length: int, config: PlannerConfig) -> float:
    """The smallest ratio with which a sequence fits the whole domain; 0 when it fits anyway.

    Raises:
        PlanError: it does not fit with everything that may go on the host; says what would.
    """
    room, ranks = config.capacity * config.num_ranks, config.num_ranks
    if length <= room:
        return 0.0
    layers = layers_per_rank(config)
    if config.offload and layers > 2:
        # resident_fraction(r) length <= N C, solved for r
        ratio = (1 - room / length) * layers / (layers - 2)
        held = host_bytes(length, Degree(ranks, ratio), config)
        if ratio <= 1 and held <= config.host_memory:
            return ratio
    raise PlanError(
        f"a sequence of {length} tokens does not fit {ranks} ranks of capacity {config.capacity}, "
        f"which hold {room}: give a capacity of at least {-(-length // ranks)}, or more ranks"
        + (", or more host memory" if config.offload else ", or offload")
    )
