# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Valid plans with nothing of a strategy in them: any rings, any order of members, any slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_hdp.planning import Plan, StepRequest
from megatron_hdp.planning.builder import PlanBuilder


def random_plan(
    request: StepRequest, num_ranks: int, rng: np.random.RandomState, degree: int = 1
) -> Plan:
    """Places the request's sequences at random; the capacity is whatever that needs.

    Of the rings that `degree` divides, each second one splits heads over so many members.

    Ranks end early, hold only zero-loss micro-batches, or nothing but a shard of no token.
    """
    builder = PlanBuilder(request.ids, request.lengths, num_ranks, int(request.lengths.sum()))
    left = list(rng.permutation(len(request.lengths)))
    slots = rng.randint(1, 8)
    for slot in range(slots):
        members = list(rng.permutation(num_ranks)[rng.randint(num_ranks) :])
        while len(members) >= 2 and left:
            size = rng.randint(1, len(members) + 1)
            ring, members = members[:size], members[size:]
            if size > 1:
                taken = [left.pop() for _ in range(min(len(left), rng.randint(1, 3)))]
                builder.add_ring([int(rank) for rank in ring], slot, taken)
    reach = rng.randint(0, slots + 1, num_ranks)  # how many slots of each rank take local ones
    reach[rng.randint(num_ranks)] = slots
    for sequence in left:
        rank = int(rng.choice(np.flatnonzero(reach)))
        builder.add_local(rank, int(rng.randint(reach[rank])), [sequence])
    plan = builder.build(request.step, "random")
    degrees = np.where(plan.ring_sizes % degree == 0, degree, 1)
    degrees[::2] = 1
    return replace(plan, head_degrees=degrees.astype(np.int32))


class RandomPlanner:
    """Stands where the data iterator's planner stands; the same plans on all ranks."""

    def __init__(
        self, request: Callable[[int], StepRequest], num_ranks: int, seed: int, degree: int = 1
    ) -> None:
        self._request, self._num_ranks, self._seed = request, num_ranks, seed
        self._degree = degree

    def get(self, step: int) -> Plan:
        rng = np.random.RandomState([self._seed, step])
        plan = random_plan(self._request(step), self._num_ranks, rng, self._degree)
        plan.validate(pipeline_depth=4)
        return plan

    def close(self) -> None: ...
