# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Steps of sequences as the paper's evaluation has them: a fixed number of packs of the context."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning import PlanError, StepRequest
from megatron_hdp.planning.distributions import draw, names
from megatron_hdp.planning.naive import best_fit_packs

Lengths = NDArray[np.int64]


def draw_steps(
    source: str | Lengths, context: int, packs: int, steps: int, seed: int
) -> list[StepRequest]:
    """`steps` requests of sequences that fill `packs` packs, best fit, in random order.

    Args:
        source: a distribution's name, cut at the context, or a user's lengths, drawn without
            putting back.

    Raises:
        PlanError: the lengths are too few, or one is longer than the context.
    """
    if isinstance(source, str):
        if source not in names():
            raise PlanError(f"--data {source} is not one of {', '.join(names())}")
        pool = draw(source, 2 * steps * packs * context, context, seed)
    else:
        pool = source[np.random.RandomState(seed).permutation(len(source))]
        if pool.max() > context:
            raise PlanError(
                f"the longest sequence has {pool.max()} tokens and the context is {context}: "
                f"raise --context, or cut it"
            )
    requests: list[StepRequest] = []
    at = 0
    for step in range(steps):
        request = _fill(pool[at:], context, packs, step, seed)
        requests.append(request)
        at += len(request.lengths)
    return requests


def _fill(pool: Lengths, context: int, packs: int, step: int, seed: int) -> StepRequest:
    """The first sequences of the pool that fit the packs."""
    total = np.cumsum(pool)
    left = int(total[-1]) if len(pool) else 0
    if left < packs * context:
        raise PlanError(
            f"step {step} needs {packs} packs of {context} tokens and {left} "
            f"are left: give more lengths, fewer --steps or fewer --tokens"
        )
    count = int(np.searchsorted(total, packs * context, side="right"))
    while True:
        lengths = pool[:count]
        found = best_fit_packs(lengths, context)
        if len(found) <= packs:
            break
        # The tail is what overflowed: sequences come in no order, so any few of them may go.
        count -= max(1, count // 200)
    order = np.random.RandomState(seed + step).permutation(len(found))
    positions = np.concatenate([np.array(found[i], np.int64) for i in order])
    offsets = np.concatenate(([0], np.cumsum([len(found[i]) for i in order]))).astype(np.int64)
    return StepRequest(np.arange(len(positions)), lengths[positions], offsets, step)
