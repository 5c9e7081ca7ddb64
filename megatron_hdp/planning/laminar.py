# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto` without pipeline stages: rings on nested blocks, placed top-down, then local sequences.

A sequence's level starts at its smallest ring and is raised while it is long against the step and
its rank-time hardly grows (the wider ring's hops are hidden). Levels are placed from the widest
down, a block inheriting its parent's load; so no ring ever waits, and slots are equal by
construction.
Several settings of "long" are tried; the best predicted step wins.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.blocks import Level, Shape
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.choices import RingChoices
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.gang import best_gang
from megatron_hdp.planning.naive import check_fits
from megatron_hdp.planning.packing import first_fit, longest_first
from megatron_hdp.planning.values import Plan

_KAPPAS = (1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.015)
_SHAPES: tuple[Shape, ...] = ("powers", "three-quarters")
_GROWTHS = (0.1, 0.2, 0.4)
"""How much rank-time a sequence may lose to hops that are not hidden, to become shorter."""
_STOP_AT = 1.006
_SEARCH_ON_ABOVE = 1.01
_TRAVEL = 0.01
"""Of two plans as fast as each other within this, the one that moves fewer tokens is taken."""
_FIXED_SLACK = 1.03
"""Local packs are not quite full: a token's part of the fixed cost is a little more than f/C."""

Ints = NDArray[np.int64]


@dataclass
class _Rings:
    """Ring micro-batches placed so far."""

    starts: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Most tokens that a member holds."""
    ring_of: list[int] = field(default_factory=list)
    """Ring of each placed sequence, in placing order."""
    order: list[int] = field(default_factory=list)
    """The placed sequences (positions in the sorted lengths)."""


@dataclass(frozen=True)
class _Placed:
    """One try: where everything went, and the step that this makes."""

    step_s: float
    score: float
    """step_s, plus a little for tokens that travel."""
    rings: _Rings
    loads: FloatArray
    """[N] seconds of ring micro-batches, fixed cost included."""
    ring_slots: Ints
    """[N] ring micro-batches."""
    local: Ints
    """Positions of the local sequences."""
    rank_of: Ints
    slot_of: Ints
    counts: Ints


def plan_laminar(config: PlannerConfig, request: StepRequest) -> Plan:
    """The best of several settings by predicted step time; stops when near the bound.

    Raises:
        PlanError: a sequence does not fit the domain.
    """
    cost = config.cost()
    lengths = np.asarray(request.lengths, np.int64)
    check_fits(lengths, config)
    order = np.argsort(-lengths, kind="stable")
    bound = lower_bound(lengths, config.num_ranks, config.room, cost)
    search = _Search(config, cost, lengths[order], bound)
    near = _SEARCH_ON_ABOVE * bound
    best = search.few()
    exact: tuple[float, Plan] | None = None
    if best.step_s > near and config.expert_ranks == 1:
        exact = best_gang(config, request, bound)
        if exact[0] <= near:
            return exact[1]
    best = search.all()
    if exact is not None and exact[0] < best.step_s:
        return exact[1]
    return _assemble(config, request, order, best, bound)


class _Search:
    """The best of several trees, growths and kappas; most steps end after one or a few tries."""

    def __init__(self, config: PlannerConfig, cost: CostModel, lengths: Ints, bound: float) -> None:
        self.bound = bound
        self.make_placer = functools.cache(
            lambda shape: _Placer(config, cost, lengths, bound, shape)
        )
        self.best: _Placed | None = None

    def few(self) -> _Placed:
        """All kappas in the tree of powers, at the first growth."""
        return self._try(_SHAPES[0], _GROWTHS[0])

    def all(self) -> _Placed:
        """Every setting, until one is near the bound; those that were tried cost little."""
        best = self.few()
        for shape, growth in list(itertools.product(_SHAPES, _GROWTHS))[1:]:
            if best.step_s <= _SEARCH_ON_ABOVE * self.bound:
                return best
            best = self._try(shape, growth)
        behind = self.make_placer(_SHAPES[-1]).behind_rings(best)
        return min(best, behind, key=lambda placed: placed.score)

    def _try(self, shape: Shape, growth: float) -> _Placed:
        placer = self.make_placer(shape)
        for kappa in _KAPPAS:
            if self.best is not None and self.best.step_s <= _STOP_AT * self.bound:
                break
            placed = placer.place(kappa, growth)
            if placed is not None and (self.best is None or placed.score < self.best.score):
                self.best = placed
        assert self.best is not None
        return self.best


class _Placer:
    """Places one step's sequences, sorted by falling length."""

    def __init__(
        self, config: PlannerConfig, cost: CostModel, lengths: Ints, bound: float, shape: Shape
    ) -> None:
        self.config = config
        self.cost = cost
        self.lengths = lengths
        self.bound = bound
        self.choices = RingChoices(config, cost, lengths, shape)
        self._tried: set[bytes] = set()

    def place(self, kappa: float, growth: float) -> _Placed | None:
        """One try; None when its levels were tried already."""
        level_of = self.choices.choose(kappa * self.bound, growth)
        key = level_of.tobytes()
        if key in self._tried:
            return None
        self._tried.add(key)
        rings = _Rings()
        bottom = self.choices.bottom
        loads, slots = np.zeros(1), np.zeros(1, np.int64)
        for number, level in enumerate(self.choices.levels):
            if number:
                loads, slots = loads[level.parents], slots[level.parents]
            if number < bottom:
                items = np.flatnonzero(level_of == number)
                if len(items):
                    _place_level(self, level, items, loads, slots, rings)
        local = np.flatnonzero(level_of == bottom)
        return self._place_locals(local, loads, slots, rings, behind=False)

    def behind_rings(self, placed: _Placed) -> _Placed:
        """The same rings, local sequences also in the room behind each rank's last ring.

        Saves micro-batches; costs waits where the members' tails differ.
        """
        return self._place_locals(
            placed.local, placed.loads, placed.ring_slots, placed.rings, behind=True
        )

    def _place_locals(
        self, local: Ints, loads: FloatArray, slots: Ints, rings: _Rings, *, behind: bool
    ) -> _Placed:
        lengths = self.lengths[local]
        fixed = self.cost.fixed_s
        seconds = self.cost.local_s(lengths)
        weights = seconds + _FIXED_SLACK * fixed / self.config.capacity * lengths
        rank_of = longest_first(weights, loads)
        room = np.where(slots > 0, 0, self.config.capacity)
        if behind:
            room = _room_behind_rings(rings, slots, self.config)
        slot_of, counts = first_fit(lengths, rank_of, room, slots, self.config.capacity)
        total = loads + np.bincount(rank_of, weights=seconds, minlength=len(loads))
        if behind:
            total += _waits_behind_rings(rings, slots, rank_of, slot_of, seconds)
        step_s = float((total + fixed * (counts - slots)).max())
        travelled = 1.0 - float(lengths.sum()) / float(self.lengths.sum())
        score = step_s * (1.0 + _TRAVEL * travelled)
        return _Placed(step_s, score, rings, loads, slots, local, rank_of, slot_of, counts)


def _place_level(
    placer: _Placer, level: Level, items: Ints, loads: FloatArray, slots: Ints, rings: _Rings
) -> None:
    """Puts a level's sequences, longest first, on the least loaded block that is wide enough.

    A sequence joins the block's first micro-batch of this level with room, else opens one. Updates
    loads (seconds, fixed cost included) and slots of the level's blocks in place.
    """
    room, cost = placer.config.room, placer.cost
    heaps: dict[int, list[tuple[float, int]]] = {}
    for block, width in enumerate(level.widths.tolist()):
        heaps.setdefault(width, []).append((float(loads[block]), block))
    for heap in heaps.values():
        heapq.heapify(heap)
    widths = sorted(width for width in heaps if width > 1)
    opened: dict[int, list[int]] = {}
    sums: dict[int, tuple[float, float, float]] = {}
    seconds = _RingSeconds(cost)
    parts = {width: _ring_parts(cost, placer.lengths[items], width) for width in widths}
    for at, item in enumerate(items.tolist()):
        length, need = int(placer.lengths[item]), int(placer.choices.needs[item])
        width = min((w for w in widths if w >= need), key=lambda w: heaps[w][0])
        load, block = heaps[width][0]
        shard = min(room, 2 * -(-length // (2 * width)))
        ring = next((r for r in opened.get(block, ()) if rings.tokens[r] + shard <= room), None)
        if ring is None:
            ring = len(rings.starts)
            opened.setdefault(block, []).append(ring)
            rings.starts.append(int(level.starts[block]))
            rings.widths.append(width)
            rings.slots.append(int(slots[block]))
            rings.tokens.append(0)
            slots[block] += 1
            sums[ring] = (0.0, 0.0, 0.0)
            load += cost.fixed_s
        squares, tokens, carried = sums[ring]
        more_squares, more_carried = parts[width][0][at], parts[width][1][at]
        after = (squares + more_squares, tokens + length, carried + more_carried)
        load += seconds(*after, width) - (seconds(*sums[ring], width) if tokens else 0.0)
        sums[ring] = after
        rings.tokens[ring] += shard
        rings.ring_of.append(ring)
        rings.order.append(item)
        heapq.heapreplace(heaps[width], (load, block))
    for heap in heaps.values():
        for load, block in heap:
            loads[block] = load


def _ring_parts(cost: CostModel, lengths: Ints, width: int) -> tuple[list[float], list[float]]:
    """`squares` and `hop_tokens` of a level's sequences on rings of `width`, in plain floats."""
    return cost.squares(lengths, width).tolist(), cost.hop_tokens(lengths, width).tolist()


class _RingSeconds:
    """CostModel.ring_s for one ring at a time, in plain floats; a block is taken as aligned."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._attention = cost._scale * cost.attention_s
        self._linear = cost._scale * cost.token_s
        self._latency = cost.layers * cost.latency_s
        self._hops: dict[int, float] = {}

    def __call__(self, squares: float, tokens: float, carried: float, width: int) -> float:
        hop = self._hops.get(width)
        if hop is None:
            hop = self._hops[width] = float(self._cost.hop_s(width))
        step = self._attention * squares / (width * width)
        transfer = hop * carried / width + self._latency
        return self._linear * tokens / width + step + (width - 1) * max(step, transfer)


def _room_behind_rings(rings: _Rings, slots: Ints, config: PlannerConfig) -> Ints:
    """[N] tokens free in each rank's last ring micro-batch; the capacity where there is none.

    Only where it is the last one of all its members: unequal tails would make a later ring wait.
    """
    room = np.where(slots > 0, 0, config.capacity)
    for start, width, slot, tokens in zip(
        rings.starts, rings.widths, rings.slots, rings.tokens, strict=True
    ):
        members = slice(start, start + width)
        if (slots[members] == slot + 1).all():
            room[members] = max(0, config.capacity - tokens)
    return room


def _waits_behind_rings(
    rings: _Rings, slots: Ints, rank_of: Ints, slot_of: Ints, seconds: FloatArray
) -> FloatArray:
    """[N] seconds that members wait for the longest tail behind their last ring."""
    tail = slot_of == slots[rank_of] - 1
    tails = np.bincount(rank_of[tail], weights=seconds[tail], minlength=len(slots))
    waits = np.zeros(len(slots))
    for start, width, slot in zip(rings.starts, rings.widths, rings.slots, strict=True):
        members = slice(start, start + width)
        if (slots[members] == slot + 1).all():
            waits[members] = tails[members].max() - tails[members]
    return waits


def _assemble(
    config: PlannerConfig, request: StepRequest, order: Ints, placed: _Placed, bound: float
) -> Plan:
    """The plan's arrays, in falling length."""
    count = len(order)
    rings = placed.rings
    ring_of = np.full(count, -1, np.int32)
    rank_of = np.full(count, -1, np.int32)
    slot_of = np.empty(count, np.int32)
    ring_of[rings.order] = rings.ring_of
    slot_of[rings.order] = np.asarray(rings.slots, np.int64)[rings.ring_of]
    rank_of[placed.local] = placed.rank_of
    slot_of[placed.local] = placed.slot_of
    widths = np.asarray(rings.widths, np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
    within = np.arange(int(widths.sum())) - np.repeat(offsets[:-1], widths)
    members = np.repeat(np.asarray(rings.starts, np.int64), widths) + within
    counts = equal_counts(placed.counts, config.expert_ranks)
    return Plan(
        step=request.step,
        strategy="auto",
        num_ranks=config.num_ranks,
        capacity=config.capacity,
        ids=np.asarray(request.ids, np.int64)[order],
        lengths=np.asarray(request.lengths, np.int64)[order],
        ring_of=ring_of,
        rank_of=rank_of,
        slot_of=slot_of,
        ring_offsets=offsets,
        ring_ranks=members.astype(np.int32),
        ring_slots=np.asarray(rings.slots, np.int32),
        micro_batch_counts=counts.astype(np.int32),
        lower_bound_s=bound,
    )
