# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The order of a blend whose packs' tokens are all known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def order_by_tokens(
    tokens: list[NDArray[np.int64]], weights: NDArray[np.float64], num_packs: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(part [num_packs], pack of it [num_packs]): TokenBlend's order, all at once.

    A pack's turn comes when its part has given tokens / weight as many as the packs before it.

    Args:
        tokens: per part, [packs] tokens of each of its packs.
        weights: [parts] positive, in any unit.
    """
    starts = [(np.cumsum(own) - own) / weight for own, weight in zip(tokens, weights, strict=True)]
    part = np.repeat(np.arange(len(tokens)), [len(own) for own in tokens])
    index = np.concatenate([np.arange(len(own)) for own in tokens])
    order = np.argsort(np.concatenate(starts), kind="stable")[:num_packs]
    return part[order], index[order]
