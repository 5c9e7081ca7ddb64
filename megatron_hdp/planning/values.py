# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The values every layer speaks: Sequence, Ring, MicroBatch and Plan.

A plan is stored as a handful of NumPy arrays (a step of 160,000 sequences is a few megabytes and is
checked in milliseconds); `Plan.micro_batches(rank)` shows one rank's part as small objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


class Sequence(NamedTuple):
    """One document or sample; attention never crosses it.

    `id` names the sequence within its epoch stream (unique in a step), `length` is in tokens.
    """

    id: int
    length: int


class Ring(NamedTuple):
    """An ordered tuple of HDP ranks (at least two) that share sequences and pass K/V round.

    `ranks[i]` holds chunks i and 2P-1-i of each of the ring's sequences; it sends to `ranks[i+1]`.
    """

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank runs in one forward and backward: one ring's shards, then local sequences.

    A micro-batch without any sequence is a zero-loss one (it pads a rank to an equal slot count).
    """

    slot: int
    ring: Ring | None
    ring_sequences: tuple[Sequence, ...]
    local_sequences: tuple[Sequence, ...]
    offload_ratio: float = 0.0
    predicted_s: float = 0.0
    head_degree: int = 1
    """Neighbours in the ring that split heads among them (`head_parallel`); 1: none do."""


def cut_points(length: int, ring_size: int) -> list[int]:
    """Boundaries of the 2P zigzag chunks of a sequence: floor(i * length / 2P), i = 0 .. 2P."""
    parts = 2 * ring_size
    return [i * length // parts for i in range(parts + 1)]


def shard_tokens(lengths: IntArray, ring_sizes: IntArray, index: IntArray) -> IntArray:
    """Tokens that ring member `index` holds of a sequence: exact chunk sizes, element-wise.

    Args are int64 arrays (or broadcastable scalars); the result has their common shape.
    """
    s, i = np.asarray(lengths, np.int64), np.asarray(index, np.int64)
    parts = 2 * np.asarray(ring_sizes, np.int64)
    mirror = parts - 1 - i
    first = (i + 1) * s // parts - i * s // parts
    return first + (mirror + 1) * s // parts - mirror * s // parts


def resident_fraction(offload_ratio: NDArray[np.float64], num_layers: int) -> NDArray[np.float64]:
    """Share of a micro-batch's activations that stays on the device (ByteScale, Eq. 3).

    Two layers are always resident, of the others a share r is on the host:
    (2 + (1-r)(l-2)) / l. With r = 0, or fewer than three layers, everything stays.
    """
    r = np.asarray(offload_ratio, np.float64)
    if num_layers <= 2:
        return np.ones_like(r)
    return (2.0 + (1.0 - r) * (num_layers - 2)) / num_layers


def resident_share(
    layers_share: NDArray[np.float64],
    loss_share: float,
    pipeline_depth: int,
    recomputed_share: float = 0.0,
) -> NDArray[np.float64]:
    """Bytes that a micro-batch holds with offload over what as many tokens hold without.

    The first of p stages holds the layers of p micro-batches, and what full recompute brings back
    of one; the last stage one micro-batch's layers and its loss (`DeviceMemory.needed`). Offload
    moves the saved layers only. With f the layers' `resident_fraction`, q the loss's bytes and r
    the recomputed ones over a token's layers, the share is that of the fullest stage:
    max(p f + r, f + q) / max(p + r, 1 + q), f itself where q and r are 0.
    """
    f, p = np.asarray(layers_share, np.float64), pipeline_depth
    whole = max(p + recomputed_share, 1.0 + loss_share)
    return np.maximum(p * f + recomputed_share, f + loss_share) / whole


@dataclass(frozen=True, eq=False)
class Plan:
    """Every rank's micro-batches for one optimizer step. A value: no tensors, nothing mutable.

    Micro-batches are numbered rank-major: rank r's slot k is `first_micro_batch[r] + k`.
    Within a micro-batch, ring sequences come first, then local ones, both in array order.
    """

    step: int
    strategy: str
    num_ranks: int
    capacity: int
    """Tokens per rank in one micro-batch without offload."""
    ids: NDArray[np.int64]
    """[S] sequence ids."""
    lengths: NDArray[np.int64]
    """[S] tokens per sequence."""
    ring_of: NDArray[np.int32]
    """[S] the sequence's ring, -1 for a local sequence."""
    rank_of: NDArray[np.int32]
    """[S] the rank of a local sequence, -1 for a ring's."""
    slot_of: NDArray[np.int32]
    """[S] the sequence's slot (for a ring's sequence: the ring's slot)."""
    ring_offsets: NDArray[np.int64]
    """[R+1] ring j is `ring_ranks[ring_offsets[j]:ring_offsets[j+1]]`."""
    ring_ranks: NDArray[np.int32]
    """Members of all rings, in ring order."""
    ring_slots: NDArray[np.int32]
    """[R] the slot of ring j, the same on every member (design rule 2)."""
    micro_batch_counts: NDArray[np.int32]
    """[N] micro-batches of every rank."""
    offload_ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[M] share of saved bytes that goes to the host, per micro-batch; empty means all zero."""
    predicted_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[M] predicted seconds (forward and backward) per micro-batch; empty means not predicted."""
    head_degrees: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R] members that heads are split over, per ring; empty means that none are."""
    num_layers: int = 0
    """Transformer layers per rank, for the memory rule under offload."""
    loss_share: float = 0.0
    """Bytes of a token's loss over those of its layers on a stage, for the same rule."""
    recomputed_share: float = 0.0
    """Bytes that full recompute brings back of a token, likewise."""
    predicted_step_s: float = 0.0
    lower_bound_s: float = 0.0

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_rings(self) -> int:
        return len(self.ring_slots)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def ring_sizes(self) -> NDArray[np.int64]:
        """[R] members of each ring."""
        return np.diff(self.ring_offsets)

    @cached_property
    def first_micro_batch(self) -> NDArray[np.int64]:
        """[N+1] number of each rank's first micro-batch; the last entry is M."""
        return np.concatenate(([0], np.cumsum(self.micro_batch_counts, dtype=np.int64)))

    @cached_property
    def shards(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(sequence index, micro-batch number, tokens) of every shard of every sequence.

        A local sequence is one shard; a ring's sequence is one shard per member, possibly empty.
        """
        local = np.flatnonzero(self.ring_of < 0)
        mb_local = self.first_micro_batch[self.rank_of[local]] + self.slot_of[local]
        on_ring = np.flatnonzero(self.ring_of >= 0)
        rings = self.ring_of[on_ring]
        size = self.ring_sizes[rings]
        seq = np.repeat(on_ring, size)
        first = np.cumsum(size) - size
        index = np.arange(len(seq), dtype=np.int64) - np.repeat(first, size)
        ranks = self.ring_ranks[np.repeat(self.ring_offsets[rings], size) + index]
        mb_ring = self.first_micro_batch[ranks] + np.repeat(self.ring_slots[rings], size)
        tokens = shard_tokens(self.lengths[seq], np.repeat(size, size), index)
        return (
            np.concatenate((local, seq)),
            np.concatenate((mb_local, mb_ring)),
            np.concatenate((self.lengths[local], tokens)),
        )

    @cached_property
    def micro_batch_tokens(self) -> NDArray[np.int64]:
        """[M] exact tokens of every micro-batch."""
        _, micro_batch, tokens = self.shards
        total = int(self.first_micro_batch[-1])
        return np.bincount(micro_batch, weights=tokens, minlength=total).astype(np.int64)

    def resident_tokens(self, pipeline_depth: int) -> NDArray[np.float64]:
        """[M] tokens without offload that would take as many bytes as the micro-batch does."""
        tokens = self.micro_batch_tokens.astype(np.float64)
        if not len(self.offload_ratios):
            return tokens
        layers = resident_fraction(self.offload_ratios, self.num_layers)
        unmoved = self.loss_share, pipeline_depth, self.recomputed_share
        return tokens * resident_share(layers, *unmoved)

    @property
    def travelled_token_share(self) -> float:
        """Share of the step's tokens that sit on a ring of two ranks or more."""
        total = self.num_tokens
        return float(self.lengths[self.ring_of >= 0].sum()) / total if total else 0.0

    def ring(self, index: int) -> Ring:
        members = self.ring_ranks[self.ring_offsets[index] : self.ring_offsets[index + 1]]
        return Ring(tuple(int(r) for r in members))

    def micro_batches(self, rank: int) -> list[MicroBatch]:
        """This rank's micro-batches in slot order."""
        start, count = int(self.first_micro_batch[rank]), int(self.micro_batch_counts[rank])
        sequence, micro_batch, _ = self.shards
        mine = np.flatnonzero((micro_batch >= start) & (micro_batch < start + count))
        ring_parts: list[list[Sequence]] = [[] for _ in range(count)]
        local_parts: list[list[Sequence]] = [[] for _ in range(count)]
        rings: list[Ring | None] = [None] * count
        degrees = [1] * count
        for shard in mine[np.argsort(sequence[mine], kind="stable")]:
            seq, slot = int(sequence[shard]), int(micro_batch[shard]) - start
            value = Sequence(int(self.ids[seq]), int(self.lengths[seq]))
            ring = int(self.ring_of[seq])
            if ring < 0:
                local_parts[slot].append(value)
            else:
                ring_parts[slot].append(value)
                rings[slot] = rings[slot] or self.ring(ring)
                degrees[slot] = int(self.head_degrees[ring]) if len(self.head_degrees) else 1
        ratios, predicted = self.offload_ratios, self.predicted_s
        return [
            MicroBatch(
                slot,
                rings[slot],
                tuple(ring_parts[slot]),
                tuple(local_parts[slot]),
                float(ratios[start + slot]) if len(ratios) else 0.0,
                float(predicted[start + slot]) if len(predicted) else 0.0,
                degrees[slot],
            )
            for slot in range(count)
        ]

    def validate(
        self,
        *,
        ids: IntArray | None = None,
        lengths: IntArray | None = None,
        pipeline_depth: int = 1,
        expert_ranks: int = 1,
        slot_group: int = 1,
    ) -> None:
        """Checks the rules of `megatron_hdp.planning.validation`; raises PlanError otherwise."""
        from megatron_hdp.planning.validation import validate

        validate(
            self,
            ids=ids,
            lengths=lengths,
            pipeline_depth=pipeline_depth,
            expert_ranks=expert_ranks,
            slot_group=slot_group,
        )

    def digest(self, *, corpus: str = "", config: str = "") -> PlanDigest:
        """What all ranks must agree on before the step's first forward."""
        from megatron_hdp.planning.digest import digest

        return digest(self, corpus=corpus, config=config)


class PlanDigest(NamedTuple):
    """64-bit hashes by field, so that a difference between ranks can be named."""

    config: int
    corpus: int
    sequences: int
    layout: int


class PlanError(ValueError):
    """A plan breaks a rule, or no plan exists for the request; the message says which and why."""
