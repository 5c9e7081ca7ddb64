# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Equal slots in whole groups, as Megatron's interleaved pipeline schedule walks them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_hdp.planning.values import Plan


def in_whole_groups(plan: Plan, group: int) -> Plan:
    """The plan with equally many slots on all ranks, a multiple of `group`.

    Added slots come last on each rank; they run zero-loss micro-batches.
    """
    counts = plan.micro_batch_counts
    wanted = -(-int(counts.max()) // group) * group
    if counts.min() == wanted:
        return plan
    ratios = plan.offload_ratios
    if len(ratios):
        kept = np.arange(wanted)[None] < counts[:, None]
        padded = np.zeros(kept.shape)
        padded[kept] = ratios
        ratios = padded.reshape(-1)
    return replace(plan, micro_batch_counts=np.full_like(counts, wanted), offload_ratios=ratios)
