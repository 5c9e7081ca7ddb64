# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`static`: what Megatron's DP x CP mesh does with packed samples. The baseline."""

from __future__ import annotations

import numpy as np

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.values import Plan, PlanError


def plan_static(config: PlannerConfig, request: StepRequest) -> Plan:
    """Pack p goes to replica p mod DP, slot p div DP, and every sequence of it over the whole CP.

    Raises:
        PlanError: without packs, with fewer packs than replicas, or with a pack over the capacity.
    """
    if request.packs is None:
        raise PlanError("strategy static needs the step's packs")
    width = config.context_parallel_size
    replicas = config.num_ranks // width
    packs = np.asarray(request.packs, np.int64)
    if len(packs) - 1 < replicas:
        raise PlanError(
            f"strategy static has {len(packs) - 1} packs for {replicas} data-parallel replicas: "
            f"raise the global batch size to at least {replicas}"
        )
    builder = PlanBuilder(request.ids, request.lengths, config.num_ranks, config.capacity)
    for pack in range(len(packs) - 1):
        sequences = np.arange(packs[pack], packs[pack + 1])
        tokens = int(builder.lengths[sequences].sum())
        if tokens > width * config.capacity:
            raise PlanError(
                f"strategy static cannot hold a pack of {tokens} tokens on {width} ranks of "
                f"capacity {config.capacity}: raise --hdp-capacity or --context-parallel-size"
            )
        replica, slot = pack % replicas, pack // replicas
        if width == 1:
            builder.add_local(replica, slot, sequences)
        else:
            ranks = range(replica * width, (replica + 1) * width)
            builder.add_ring(list(ranks), slot, sequences)
    return builder.build(request.step, "static")
