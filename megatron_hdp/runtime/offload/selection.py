# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which of a layer's saved bytes go to the host. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

MAX_GRANULE = 512


def granule(shape: Sequence[int], itemsize: int) -> int:
    """Bytes that a cut is a multiple of: a row of the tensor, at most 512 bytes."""
    row = itemsize
    longer = [size for size in shape if size > 1]
    for size in longer[1:]:
        row *= size
    return row if row < MAX_GRANULE else MAX_GRANULE


def choose(sizes: Sequence[int], granules: Sequence[int], ratio: float) -> list[int]:
    """Leading bytes of each tensor to offload: ratio x all bytes, to half a granule.

    Whole tensors first, the largest first, since a tensor that is cut needs its kept part copied
    (the allocator cannot free half a block); at most one is cut, the smallest that can be.
    """
    taken = [0] * len(sizes)
    left = round(ratio * sum(sizes))
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[i] <= left:
            taken[i] = sizes[i]
            left -= sizes[i]
    kept = [i for i in range(len(sizes)) if taken[i] < sizes[i]]
    if left and kept:
        i = min(kept, key=lambda i: (sizes[i], i))
        taken[i] = min(sizes[i], round(left / granules[i]) * granules[i])
    return taken
