# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The rules that every plan obeys, checked in milliseconds on every step.

1. Every token exactly once: each sequence sits on one ring or one rank, none is lost or added.
2. Rings have distinct ranks, at least two; a micro-batch has at most one ring.
3. A ring has the same slot on every member, and every rank has a micro-batch: with these no wait
   cycle exists, at any pipeline depth (proof below).
4. Resident tokens of a micro-batch, its loss and recompute counted, stay within the capacity at
   its offload ratio.
5. Ranks that share experts have equally many micro-batches; with `slot_group` all ranks do, a
   multiple of it.

**Why rule 3 suffices.** Let p stages run 1F1B, let F(j, k) and B(j, k) be stage j's forward and
backward of slot k, and w_j = p-1-j its warm-up. A rank's list with m slots is the infinite list
F(j, 0) .. F(j, w_j - 1), then F(j, w_j + i), B(j, i) for i = 0, 1, ..., restricted to slots below
m. Give every operation a key, compared from the left:

    F(j, k), k < w_j   (-1, j + k)
    F(j, w_j + i)      (i, 0, j)
    B(j, i)            (i, 1, p-1-j)

Every operation waits only for smaller keys:

* its own stage's previous operation: keys rise along the list, and along any restriction of it;
* F(j, k) for F(j-1, k): as w_{j-1} = w_j + 1, that is (-1, j-1+k) where k <= w_j, and
  (i-1, 0, j-1) where k = w_j + i, i > 0; B(j, i) for B(j+1, i), (i, 1, p-2-j);
* a blocking send, which ends when the neighbour has done what stands before the receiving
  operation. After F(j, k), k < w_j, that is at most F(j+1, k-1), (-1, j+k), and the next operation
  has at least (-1, j+k+1). After F(j, w_j + i) it is at most B(j+1, i), (i, 1, p-2-j), and next
  comes B(j, i). After B(j, i) it is at most F(j-1, w_{j-1} + i), (i, 0, j-1), and what comes next
  starts with i+1.

Keys depend on stage and slot, never on the rank or on m. So an operation of a ring, the same slot
on every member, has one key, and joining the members' operations leaves every wait on a smaller
key: no cycle. Ranks that share experts and run equally many slots have the same lists, so they meet
in one key too; there, layer by layer, all of them enter the ring first and the exchange second, and
in the backward the other way round: one order inside a key. Small plans are walked through besides,
every forward and backward of every stage (`order.py`); that walk knows nothing of keys and is the
proof's oracle in the tests.

**Interleaved stages** need no keys: with equal counts all ranks have the same list on a stage,
Megatron's for one pipeline, which ends. Number a pipeline's operations and transfers in an order in
which they complete; every rank has the same numbers, and a ring's operation, the same slot of the
same model chunk on every member, has one. So joining waits only for smaller numbers again.
"""

from __future__ import annotations

import numpy as np

from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.order import Entry, find_deadlock
from megatron_hdp.planning.values import IntArray, Plan, PlanError


def validate(
    plan: Plan,
    *,
    ids: IntArray | None = None,
    lengths: IntArray | None = None,
    pipeline_depth: int = 1,
    expert_ranks: int = 1,
    slot_group: int = 1,
) -> None:
    """Raises PlanError with the first broken rule.

    Args:
        ids, lengths: [S] what the step was asked to place; when given, compared with the plan.
        pipeline_depth: stages under the plan.
        expert_ranks: neighbouring ranks that share experts; they need equally many micro-batches.
        slot_group: above 1 all ranks need equally many, a multiple of this (interleaved pipeline).
    """
    _check_shapes(plan)
    _check_sequences(plan, ids, lengths)
    _check_rings(plan)
    _check_slots(plan, expert_ranks, slot_group)
    _check_memory(plan, pipeline_depth)
    _check_order(plan, pipeline_depth, expert_ranks)


_WALKED_OPERATIONS = 4096


def _check_order(plan: Plan, depth: int, expert_ranks: int) -> None:
    if 2 * depth * int(plan.micro_batch_counts.sum()) > _WALKED_OPERATIONS:
        return
    entries: dict[int, list[Entry]] = {
        rank: [None] * int(count) for rank, count in enumerate(plan.micro_batch_counts)
    }
    for number in range(plan.num_rings):
        ring = plan.ring(number).ranks
        for rank in ring:
            entries[rank][int(plan.ring_slots[number])] = ring
    deadlock = find_deadlock(entries, depth, expert_ranks)
    if deadlock is not None:
        raise PlanError(f"the plan deadlocks: {deadlock}")


def _check_shapes(plan: Plan) -> None:
    sequences, rings = len(plan.lengths), len(plan.ring_slots)
    for name in ("ids", "ring_of", "rank_of", "slot_of"):
        if len(getattr(plan, name)) != sequences:
            raise PlanError(
                f"the plan's {name} has {len(getattr(plan, name))} entries for "
                f"{sequences} sequences"
            )
    if len(plan.ring_offsets) != rings + 1 or plan.ring_offsets[0] != 0:
        raise PlanError(f"the plan's ring_offsets do not describe {rings} rings")
    if plan.ring_offsets[-1] != len(plan.ring_ranks):
        raise PlanError("the plan's ring_ranks are not covered by its ring_offsets")
    if len(plan.micro_batch_counts) != plan.num_ranks:
        raise PlanError(f"the plan has micro-batch counts for {len(plan.micro_batch_counts)} ranks")
    total = int(plan.micro_batch_counts.sum())
    for name in ("offload_ratios", "predicted_s"):
        if len(getattr(plan, name)) not in (0, total):
            raise PlanError(f"the plan's {name} do not match its {total} micro-batches")
    if len(plan.head_degrees) not in (0, rings):
        raise PlanError(f"the plan's head_degrees do not match its {rings} rings")


def _check_sequences(plan: Plan, ids: IntArray | None, lengths: IntArray | None) -> None:
    if plan.num_sequences == 0 or plan.lengths.min() < 1:
        raise PlanError("a plan places at least one sequence, and each has at least one token")
    order = np.argsort(plan.ids, kind="stable")
    repeated = np.flatnonzero(np.diff(plan.ids[order]) == 0)
    if len(repeated):
        raise PlanError(f"sequence {plan.ids[order][repeated[0]]} is placed twice")
    if ids is not None and lengths is not None:
        wanted = np.argsort(ids, kind="stable")
        if not np.array_equal(np.asarray(ids)[wanted], plan.ids[order]):
            raise PlanError("the plan's sequences are not those of the step: one is lost or added")
        if not np.array_equal(np.asarray(lengths)[wanted], plan.lengths[order]):
            raise PlanError("a sequence's length in the plan is not its length in the step")
    on_ring, on_rank = plan.ring_of >= 0, plan.rank_of >= 0
    if np.any(on_ring == on_rank):
        raise PlanError("a sequence must be on exactly one ring or exactly one rank")
    if on_ring.any() and plan.ring_of.max() >= plan.num_rings:
        raise PlanError(f"a sequence is on ring {plan.ring_of.max()} of {plan.num_rings}")
    if on_rank.any() and plan.rank_of.max() >= plan.num_ranks:
        raise PlanError(f"a sequence is on rank {plan.rank_of.max()} of {plan.num_ranks}")
    wrong = plan.slot_of[on_ring] != plan.ring_slots[plan.ring_of[on_ring]]
    if wrong.any():
        raise PlanError("a sequence's slot differs from its ring's")


def _check_rings(plan: Plan) -> None:
    if plan.num_rings == 0:
        return
    sizes = plan.ring_sizes
    if sizes.min() < 2:
        raise PlanError("a ring has at least two ranks; one rank alone is local")
    if plan.ring_ranks.min() < 0 or plan.ring_ranks.max() >= plan.num_ranks:
        raise PlanError(f"a ring names rank {plan.ring_ranks.max()} of {plan.num_ranks}")
    if len(np.unique(plan.ring_of[plan.ring_of >= 0])) != plan.num_rings:
        raise PlanError("a ring holds no sequence")
    ring_of_member = np.repeat(np.arange(plan.num_rings), sizes)
    key = ring_of_member * plan.num_ranks + plan.ring_ranks
    if len(np.unique(key)) != len(key):
        raise PlanError("a ring names a rank twice")
    slots = plan.ring_slots[ring_of_member].astype(np.int64)
    place = slots * plan.num_ranks + plan.ring_ranks
    if len(np.unique(place)) != len(place):
        raise PlanError("two rings share a rank and a slot")
    degrees = plan.head_degrees
    if len(degrees) and (degrees.min() < 1 or np.any(sizes % degrees)):
        wrong = int(np.flatnonzero((degrees < 1) | (sizes % np.maximum(degrees, 1) > 0))[0])
        raise PlanError(
            f"a ring of {sizes[wrong]} ranks cannot split heads over {degrees[wrong]} of them"
        )


def _check_slots(plan: Plan, expert_ranks: int, slot_group: int) -> None:
    counts = plan.micro_batch_counts
    if counts.min() < 1:
        raise PlanError(f"rank {int(counts.argmin())} has no micro-batch")
    missing = np.flatnonzero(counts != equal_counts(counts, expert_ranks))
    if len(missing):
        rank = int(missing[0])
        first = rank // expert_ranks * expert_ranks
        raise PlanError(
            f"rank {rank} has {counts[rank]} micro-batches where ranks {first} to "
            f"{first + expert_ranks - 1}, which share experts, need equally many"
        )
    if slot_group > 1 and counts.min() != counts.max():
        raise PlanError(f"ranks have {counts.min()} to {counts.max()} slots where all need equal")
    if counts.min() % slot_group:
        raise PlanError(f"ranks have {counts.min()} slots, no multiple of {slot_group}")
    local = plan.ring_of < 0
    late = plan.slot_of[local] >= counts[plan.rank_of[local]]
    if late.any() or plan.slot_of.min() < 0:
        raise PlanError("a local sequence is in a slot that its rank does not have")
    member_slots = np.repeat(plan.ring_slots, plan.ring_sizes)
    if np.any(member_slots >= counts[plan.ring_ranks]):
        raise PlanError("a ring is in a slot that a member does not have")


def _check_memory(plan: Plan, depth: int) -> None:
    ratios = plan.offload_ratios
    if len(ratios) and (ratios.min() < 0 or ratios.max() > 1):
        raise PlanError("an offload ratio is outside 0 .. 1")
    tokens = plan.resident_tokens(depth)
    # Shards are cut at whole tokens, up to one more than s/P for each chunk of each sequence.
    worst = int(tokens.argmax())
    if tokens[worst] > (plan.capacity + _cut_slack(plan)[worst]) * _ROUNDING:
        rank = int(np.searchsorted(plan.first_micro_batch, worst, side="right")) - 1
        raise PlanError(
            f"rank {rank} holds {tokens[worst]:.0f} resident tokens in slot "
            f"{worst - int(plan.first_micro_batch[rank])}, over its capacity {plan.capacity}"
        )


def _cut_slack(plan: Plan) -> np.ndarray:
    """[M] tokens by which whole-token cuts may exceed s/P: one per ring sequence."""
    sequence, micro_batch, _ = plan.shards
    ring = plan.ring_of[sequence] >= 0
    return np.bincount(micro_batch[ring], minlength=int(plan.first_micro_batch[-1]))


_ROUNDING = 1 + 1e-12
"""Of the ratio that brings a micro-batch to just the capacity."""
