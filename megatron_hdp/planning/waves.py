# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto` under pipeline stages: waves of equal time, the same slot on every pipeline.

Under 1F1B a slot's time matters together with its neighbours', and a ring needs one slot on all its
members. So all pipelines run the same list of waves: wave k takes about theta_k on every rank, by a
ring, by local sequences, or by both. Ring sequences go to waves by falling time; local ones fill
what is left of every (wave, rank) cell and make further waves. The waves are then ordered so that
neighbours are alike and both ends are short (little fill and drain).

Several thetas are tried; each is judged by replaying the whole plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.blocks import Shape, overlaps
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.choices import RingChoices
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.naive import check_fits
from megatron_hdp.planning.packing import longest_first
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.slot_order import with_better_order
from megatron_hdp.planning.values import Plan

Ints = NDArray[np.int64]

_SETTINGS = (
    (0.8, 1.0, (6, 0.75)), (0.6, 1.0, (8, 0.8)), (1.0, 1.0, (4, 0.75)), (0.8, 0.4, (4, 0.65)),
    (0.4, 0.4, (8, 0.8)), (1.4, 0.4, (6, 0.75)), (0.25, 1.0, (8, 0.8)), (1.0, 0.1, (4, 0.65)),
    (0.4, 1.0, (8, 0.8)), (0.4, 0.4, (2, 0.5)), (0.6, 0.4, (4, 0.65)), (0.8, 0.4, (8, 0.8)),
    (0.6, 1.0, (6, 0.75)), (1.0, 0.1, (6, 0.75)), (0.8, 1.0, (3, 0.65)), (1.0, 0.1, (8, 0.8)),
)  # fmt: skip
"""What is tried: (wave time over a full micro-batch of short sequences, rank-time that a sequence
may lose to become shorter, (waves at either end that shrink, by how much each)). A greedy choice
out of 192, on the three real distributions (docs/planning.md); the first few bring most of it."""


@dataclass(eq=False)
class _Wave:
    """One slot of all ranks."""

    theta: float
    used: FloatArray
    """[N] seconds taken."""
    tokens: Ints
    """[N] tokens held."""
    free: list[bytearray]
    """Per level, 1 for the blocks of which no rank has a ring in this wave."""
    num_free: list[int]
    """Per level, how many those are."""
    stacks: list[list[tuple[float, int]]]
    """Per level, a heap of (seconds taken, block) of the rings that stand there."""
    rings: dict[tuple[int, int], int] = field(default_factory=dict)
    """(level, block) -> ring."""


@dataclass
class _Rings:
    """Rings of all waves; `wave_of` are places before the final order."""

    starts: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    wave_of: list[int] = field(default_factory=list)
    ring_of: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)


def plan_waves(config: PlannerConfig, request: StepRequest) -> Plan:
    """The best of several wave times by replayed step time.

    Raises:
        PlanError: a sequence does not fit the domain.
    """
    cost, depth = config.cost(), config.pipeline_depth
    lengths = np.asarray(request.lengths, np.int64)
    check_fits(lengths, config)
    order = np.argsort(-lengths, kind="stable")
    bound = lower_bound(lengths, config.num_ranks, config.capacity, cost, depth)
    full = float(cost.local_s(np.array([1]))[0]) * config.capacity
    best: tuple[float, Plan] | None = None
    for shape in _shapes(config.num_ranks):
        choices = RingChoices(config, cost, lengths[order], shape)
        for theta, growth, ramp in _SETTINGS:
            level_of = choices.choose(theta * full, growth)
            waves = _Waves(config, cost, choices, level_of, theta * full, ramp, shape)
            plan = waves.build(request, order, bound)
            step_s = replay(plan, cost, depth).step_s
            if best is None or step_s < best[0]:
                best = step_s, plan
    assert best is not None
    reordered = with_better_order(best[1], cost, depth)
    return min((best[1], reordered), key=lambda plan: replay(plan, cost, depth).step_s)


def _shapes(num_ranks: int) -> tuple[Shape, ...]:
    """Halving leaves no rank over; for a power of two the trees are the same."""
    return ("powers",) if num_ranks & (num_ranks - 1) == 0 else ("powers", "halves")


def _profile(
    choices: RingChoices, level_of: Ints, num_ranks: int, theta: float, ramp: int, ratio: float
) -> list[float]:
    """Falling wave times whose sum is about the mean rank's work.

    A plateau of `theta`, then `ramp` pairs of waves that each shrink by `ratio`: in their final
    order one of a pair stands before the plateau and one behind it.
    """
    work = float(choices.areas[level_of, np.arange(len(level_of))].sum()) / num_ranks
    shrinking = [theta * ratio ** (1 + i // 2) for i in range(2 * ramp)]
    plateau = max(1, round((work - sum(shrinking)) / theta))
    return [theta] * plateau + shrinking


class _Waves:
    """One try."""

    def __init__(
        self,
        config: PlannerConfig,
        cost: CostModel,
        choices: RingChoices,
        level_of: Ints,
        theta: float,
        ramp: tuple[int, float],
        shape: Shape,
    ) -> None:
        self.config = config
        self.cost = cost
        self.choices = choices
        self.level_of = level_of
        self.theta = theta
        self.profile = _profile(choices, level_of, config.num_ranks, theta, *ramp)
        self.waves: list[_Wave] = []
        self.rings = _Rings()
        self._starts = [level.starts.tolist() for level in choices.levels]
        self._widths = [level.widths.tolist() for level in choices.levels]
        self._overlaps = overlaps(config.num_ranks, shape)

    def build(self, request: StepRequest, order: Ints, bound: float) -> Plan:
        bottom = self.choices.bottom
        on_ring = np.flatnonzero(self.level_of < bottom)
        seconds = self.choices.chosen_times(self.level_of)
        for item in on_ring[np.argsort(-seconds[on_ring], kind="stable")].tolist():
            self._place_ring(item, float(seconds[item]))
        local = np.flatnonzero(self.level_of == bottom)
        self._add_local_waves(float(seconds[local].sum()))
        cell_of, rank_of = self._fill(local, seconds[local])
        return self._assemble(request, order, local, cell_of, rank_of, bound)

    def _place_ring(self, item: int, seconds: float) -> None:
        """First wave with room: on a ring that stands there, or on a free block; else a new one."""
        level, need = int(self.level_of[item]), int(self.choices.needs[item])
        length = int(self.choices.lengths[item])
        for wave in self.waves:
            block = self._find(wave, level, need, length, seconds)
            if block is not None:
                break
        else:
            at = len(self.waves)
            target = self.profile[at] if at < len(self.profile) else self.profile[-1]
            wave = self._new_wave(max(target, seconds))
            block = self._free_block(wave, level, need)
            assert block is not None
        self._put(wave, level, block, item, length, seconds)

    def _find(self, wave: _Wave, level: int, need: int, length: int, seconds: float) -> int | None:
        if wave.theta < seconds:
            return None
        stack = wave.stacks[level]
        if stack and stack[0][0] + seconds <= wave.theta:
            block = stack[0][1]
            width = self._widths[level][block]
            held = wave.tokens[self._starts[level][block]]
            if width >= need and held + self._shard(length, width) <= self.config.capacity:
                return block
        return self._free_block(wave, level, need) if wave.num_free[level] else None

    def _shard(self, length: int, width: int) -> int:
        """Most tokens that a member holds; a sequence that fits with offload only fills it."""
        return min(self.config.capacity, 2 * -(-length // (2 * width)))

    def _free_block(self, wave: _Wave, level: int, need: int) -> int | None:
        """The first free block of a level that is wide enough."""
        widths, free = self._widths[level], wave.free[level]
        block = free.find(1)
        while block >= 0 and widths[block] < max(need, 2):
            block = free.find(1, block + 1)
        return block if block >= 0 else None

    def _put(
        self, wave: _Wave, level: int, block: int, item: int, length: int, seconds: float
    ) -> None:
        ring = wave.rings.get((level, block))
        start, width = self._starts[level][block], self._widths[level][block]
        if ring is None:
            ring = wave.rings[level, block] = len(self.rings.starts)
            self.rings.starts.append(start)
            self.rings.widths.append(width)
            self.rings.wave_of.append(self.waves.index(wave))
            self._occupy(wave, level, block)
            heapq.heappush(wave.stacks[level], (seconds, block))
        else:
            taken, _ = wave.stacks[level][0]
            heapq.heapreplace(wave.stacks[level], (taken + seconds, block))
        wave.used[start : start + width] += seconds
        wave.tokens[start : start + width] += self._shard(length, width)
        self.rings.ring_of.append(ring)
        self.rings.items.append(item)

    def _occupy(self, wave: _Wave, level: int, block: int) -> None:
        """Marks the block, what contains it and what it contains, on every level."""
        for other, (first, last) in enumerate(self._overlaps[level][block]):
            free = wave.free[other]
            wave.num_free[other] -= free.count(1, first, last)
            free[first:last] = bytes(last - first)

    def _new_wave(self, theta: float) -> _Wave:
        ranks, levels = self.config.num_ranks, self.choices.levels
        wave = _Wave(
            theta,
            np.zeros(ranks),
            np.zeros(ranks, np.int64),
            [bytearray(b"\x01" * len(level.starts)) for level in levels],
            [len(level.starts) for level in levels],
            [[] for _ in levels],
        )
        self.waves.append(wave)
        return wave

    def _add_local_waves(self, local_s: float) -> None:
        """The rest of the profile, scaled to the local work that the ring waves leave."""
        ranks = self.config.num_ranks
        left = local_s - sum(float((wave.theta - wave.used).sum()) for wave in self.waves)
        rest = self.profile[len(self.waves) :]
        if left <= 0 and self.waves:
            return
        missing = left / ranks - sum(rest)
        rest += [self.theta] * max(round(missing / self.theta), 0 if rest else 1)
        scale = left / (ranks * sum(rest))
        for theta in rest:
            self._new_wave(theta * scale)

    def _fill(self, local: Ints, seconds: FloatArray) -> tuple[Ints, Ints]:
        """Local sequences to ranks, then to the cells of each rank, by time left and token room."""
        used = np.stack([wave.used for wave in self.waves], axis=1)
        tokens = np.stack([wave.tokens for wave in self.waves], axis=1)
        theta = np.array([wave.theta for wave in self.waves])
        loads = used.sum(1)
        rank_of = longest_first(seconds, loads)
        lengths = self.choices.lengths[local]
        left = theta - used
        room = self.config.capacity - tokens
        cell_of = np.empty(len(local), np.int64)
        by_rank = np.argsort(rank_of, kind="stable")
        per_rank = np.bincount(rank_of, minlength=len(loads))
        first = np.cumsum(per_rank) - per_rank
        for turn in range(int(per_rank.max(initial=0))):
            who = np.flatnonzero(per_rank > turn)
            items = by_rank[first[who] + turn]
            size = lengths[items]
            score = np.where(room[who] >= size[:, None], left[who], -np.inf)
            full = np.isneginf(score.max(1))
            if full.any():
                extra = np.full((len(left), 1), float(np.median(theta)))
                left, room = (
                    np.hstack((left, extra)),
                    np.hstack((room, np.full((len(left), 1), self.config.capacity))),
                )
                self._new_wave(float(extra[0, 0]))
                score = np.where(room[who] >= size[:, None], left[who], -np.inf)
            where = score.argmax(1)
            left[who, where] -= seconds[items]
            room[who, where] -= size
            cell_of[items] = where
        return cell_of, rank_of

    def _order(self, times: FloatArray) -> Ints:
        """[waves] slot of each wave: short ends, the longest in the middle, neighbours alike."""
        rising = np.argsort(times, kind="stable")
        slots = np.empty(len(times), np.int64)
        sequence = np.concatenate((rising[::2], rising[1::2][::-1]))
        slots[sequence] = np.arange(len(times))
        return slots

    def _assemble(
        self,
        request: StepRequest,
        order: Ints,
        local: Ints,
        cell_of: Ints,
        rank_of: Ints,
        bound: float,
    ) -> Plan:
        count, ranks = len(order), self.config.num_ranks
        seconds = self.choices.chosen_times(self.level_of)
        cells = np.stack([wave.used for wave in self.waves], axis=1)
        np.add.at(cells, (rank_of, cell_of), seconds[local])
        there = np.zeros(cells.shape, bool)
        there[rank_of, cell_of] = True
        rings = self.rings
        for start, width, wave in zip(rings.starts, rings.widths, rings.wave_of, strict=True):
            there[start : start + width, wave] = True
        kept = np.flatnonzero(there.any(0))
        slot_of_wave = np.full(len(self.waves), -1, np.int64)
        slot_of_wave[kept] = self._order(cells[:, kept].max(0))
        ring_of = np.full(count, -1, np.int32)
        all_ranks = np.full(count, -1, np.int32)
        slot_of = np.empty(count, np.int32)
        ring_slots = slot_of_wave[np.asarray(rings.wave_of, np.int64)]
        ring_of[rings.items] = rings.ring_of
        slot_of[rings.items] = ring_slots[rings.ring_of]
        all_ranks[local] = rank_of
        slot_of[local] = slot_of_wave[cell_of]
        widths = np.asarray(rings.widths, np.int64)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
        within = np.arange(int(widths.sum())) - np.repeat(offsets[:-1], widths)
        members = np.repeat(np.asarray(rings.starts, np.int64), widths) + within
        used_slots = np.where(there, slot_of_wave, -1)
        last = np.maximum(used_slots.max(1) + 1, 1)
        if self.config.equal_slots:
            last = np.full_like(last, last.max())
        return Plan(
            step=request.step,
            strategy="auto",
            num_ranks=ranks,
            capacity=self.config.capacity,
            ids=np.asarray(request.ids, np.int64)[order],
            lengths=self.choices.lengths,
            ring_of=ring_of,
            rank_of=all_ranks,
            slot_of=slot_of,
            ring_offsets=offsets,
            ring_ranks=members.astype(np.int32),
            ring_slots=ring_slots.astype(np.int32),
            micro_batch_counts=last.astype(np.int32),
            lower_bound_s=bound,
        )
