# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A plan's digest: what all ranks must agree on, field by field, the same bytes everywhere."""

from __future__ import annotations

import hashlib

import numpy as np

from megatron_hdp.planning.values import Plan, PlanDigest


def digest(plan: Plan, *, corpus: str = "", config: str = "") -> PlanDigest:
    """64-bit hashes of options, corpus, sequences, and layout with cuts.

    Predicted times are left out: they steer the planner, not the ranks.

    Args:
        corpus: a fingerprint of the token files.
        config: options that must be the same on every rank.
    """
    layout: tuple[np.ndarray, ...] = (
        plan.ring_of,
        plan.rank_of,
        plan.slot_of,
        plan.ring_offsets,
        plan.ring_ranks,
        plan.ring_slots,
        plan.micro_batch_counts,
        plan.offload_ratios,
        plan.head_degrees,
    )
    head = np.array([plan.step, plan.num_ranks, plan.capacity, plan.num_layers], np.int64)
    return PlanDigest(
        config=_hash(config.encode()),
        corpus=_hash(corpus.encode()),
        sequences=_hash(_bytes(plan.ids), _bytes(plan.lengths)),
        layout=_hash(plan.strategy.encode(), _bytes(head), *map(_bytes, layout)),
    )


def _bytes(array: np.ndarray) -> bytes:
    kind = "<f8" if array.dtype.kind == "f" else "<i8"
    return np.ascontiguousarray(array.astype(kind)).tobytes()


def _hash(*parts: bytes) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little")
