# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How many ranks a sequence needs, and what share of its activations goes to the host (Eq. 3)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.config import PlannerConfig
from megatron_hdp.planning.values import Plan, PlanError, resident_fraction, resident_share


class Degree(NamedTuple):
    """Ranks and offload ratio of one sequence."""

    ranks: int
    ratio: float


def solve_eq3(length: int, config: PlannerConfig) -> Degree:
    """ByteScale's Eq. 3 in closed form: the fewest ranks, with copies hidden behind compute.

    Per layer, T(s) is the forward time and Act(s) the saved bytes; D falls with r, so the largest
    hidden r = min(1, T(s) B / Act(s)) is best, unless it saves less than one rank's capacity, which
    is the paper's lower bound on r: then r = 0. Both T and Act are divided by D when sharded, so
    hiding does not depend on D. The loss and what full recompute brings back stay on the device;
    the paper leaves both out.
    """
    plain = Degree(-(-length // config.capacity), 0.0)
    layers = layers_per_rank(config)
    if not config.offload or length <= config.capacity or layers <= 2:
        return plain
    cost = config.cost()
    reach = float(cost.reach(np.array([length]))[0])
    forward = cost.forward_share * (cost.attention_s * reach + cost.linear_s) * length
    activations = activation_bytes(config) * length
    ratio = min(1.0, forward * cost.host_copy_bytes_s / activations)
    saved = (1 - _resident(ratio, config)) * length
    if saved < min(config.capacity, (1 - _resident(1.0, config)) * length):
        return plain
    ranks = math.ceil(_resident(ratio, config) * length / config.capacity)
    if ranks >= plain.ranks:
        return plain
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
    shard = math.ceil(length / ranks) + 1  # a member can hold a token more than the mean
    needed = float(_needed_ratios(np.array([shard], np.float64), config)[0])
    return Degree(ranks, min(degree.ratio, needed))


def _resident(ratio: float, config: PlannerConfig) -> float:
    """Share of its bytes that a sequence keeps on the device at an offload ratio."""
    layers = resident_fraction(np.array(ratio), layers_per_rank(config))
    unmoved = config.loss_share, config.pipeline_depth, config.recomputed_share
    return float(resident_share(layers, *unmoved))


def _needed_ratios(tokens: NDArray[np.float64], config: PlannerConfig) -> NDArray[np.float64]:
    """Smallest ratios that bring tokens to the capacity: `resident_share`, solved for r.

    Above 1 where the two resident layers, with the loss or what is recomputed, are too much.
    """
    layers, share = layers_per_rank(config), config.capacity / np.maximum(tokens, config.capacity)
    loss, recomputed, depth = config.loss_share, config.recomputed_share, config.pipeline_depth
    held = share * max(depth + recomputed, 1.0 + loss)
    fraction = np.minimum(1.0, np.minimum((held - recomputed) / depth, held - loss))
    ratios: NDArray[np.float64] = (1 - fraction) * layers / (layers - 2)
    return ratios


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
    ratios = np.minimum(_needed_ratios(tokens, config), 1.0)
    return _under_offload(plan, ratios, config)


def most_room(config: PlannerConfig) -> float:
    """Tokens of a micro-batch that everything on the host brings to the capacity; 0: no offload."""
    if not config.offload or layers_per_rank(config) <= 2:
        return 0.0
    return config.capacity / _resident(1.0, config)


def copies_are_hidden(plan: Plan, config: PlannerConfig) -> bool:
    """Whether every micro-batch's offload is within its forward compute, and within the host.

    Eq. 3's condition r Act <= T B on micro-batches: T is what a member computes, without waits for
    transfers. The host holds what `host_bytes` says of as many micro-batches as stages.
    """
    if not len(plan.offload_ratios):
        return True
    cost = config.cost()
    sequence, micro_batch, tokens = plan.shards
    work = cost.attention_s * cost.reach(plan.lengths[sequence]) + cost.linear_s
    compute = np.bincount(micro_batch, weights=work * tokens, minlength=len(plan.offload_ratios))
    copied = plan.offload_ratios * plan.micro_batch_tokens * activation_bytes(config)
    hidden = copied <= cost.forward_share * compute * cost.host_copy_bytes_s * (1 + 1e-9)
    layers = (layers_per_rank(config) - 1) * config.pipeline_depth
    held = float(copied.max()) * layers / config.tensor_parallel
    return bool(hidden.all()) and held <= config.host_memory


def with_given_ratio(plan: Plan, config: PlannerConfig) -> Plan:
    """The plan with the config's own offload ratio in every micro-batch, where it has one."""
    if config.offload_ratio is None:
        return plan
    ratios = np.full(int(plan.micro_batch_counts.sum()), config.offload_ratio)
    return _under_offload(plan, ratios, config)


def _under_offload(plan: Plan, ratios: NDArray[np.float64], config: PlannerConfig) -> Plan:
    """With the ratios, and what the memory rule asks for beside them."""
    return replace(
        plan,
        offload_ratios=ratios,
        num_layers=layers_per_rank(config),
        loss_share=config.loss_share,
        recomputed_share=config.recomputed_share,
    )


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
        ratio = float(_needed_ratios(np.array([length / ranks]), config)[0])
        held = host_bytes(length, Degree(ranks, ratio), config)
        if ratio <= 1 and held <= config.host_memory:
            return ratio
    raise PlanError(
        f"a sequence of {length} tokens does not fit {ranks} ranks of capacity {config.capacity}, "
        f"which hold {room}: give a capacity of at least {-(-length // ranks)}, or more ranks"
        + (", or more host memory" if config.offload else ", or offload")
    )
