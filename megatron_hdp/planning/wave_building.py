# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Builds one list of waves: rings of fitting widths side by side, local sequences in what is left.

A wave is a slot of all ranks that takes about theta everywhere. Each sequence's ring in it is the
narrowest that is done within theta, so neighbours end together at any number of ranks. Rings of
whole nodes stand on its left, those within a node on its right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.config import StepRequest
from megatron_hdp.planning.cost import CostModel, FloatArray
from megatron_hdp.planning.experts import equal_counts
from megatron_hdp.planning.packing import longest_first
from megatron_hdp.planning.values import Plan
from megatron_hdp.planning.widths import WidthTable

Ints = NDArray[np.int64]

_FILLED = 0.95
"""A wave may be longer than the profile asks when this share of it can be filled."""
_SHORTER = 0.85
"""The next theta that is tried when a longer wave cannot be filled."""
_ROUNDING = 1 + 1e-9


class Setting(NamedTuple):
    """One shape of the waves' times."""

    theta: float
    """Seconds of a plateau wave."""
    growth: float
    """Share of rank-time that a sequence may lose to hops that are not hidden."""
    ramp: tuple[int, float]
    """(waves at either end that shrink, by how much each)."""
    grade: float
    """A wave takes at least this share of the one before it on its side, if it can be filled."""
    grain: float
    """Sequences longer than this share of theta go on rings, so that cells fill evenly."""


@dataclass(frozen=True)
class _Ring:
    start: int
    width: int
    sequences: list[int]


@dataclass
class _Wave:
    """One slot of all ranks."""

    theta: float
    used: FloatArray
    """[N] seconds taken by rings."""
    tokens: Ints
    """[N] tokens held by rings."""
    rings: list[_Ring] = field(default_factory=list)


class WaveBuilder:
    """One try: `build` gives the plan of a setting."""

    def __init__(self, table: WidthTable, cost: CostModel, setting: Setting) -> None:
        self.table = table
        self.cost = cost
        self.setting = setting
        self.allowed = table.allowed_times(setting.growth)
        """[widths, S] seconds."""
        fastest = self.allowed.min(0)
        long = (table.times[0] > setting.grain * setting.theta) & np.isfinite(fastest)
        self.on_ring = (table.narrowest > 0) | long
        self.profile = self._profile()
        self.waves: list[_Wave] = []

    def build(self, request: StepRequest, order: Ints, bound: float) -> Plan:
        """The plan; `order` sorts the request's sequences by falling length."""
        rest = np.flatnonzero(self.on_ring)
        while len(rest):
            rest = self._add_ring_wave(rest)
        local = np.flatnonzero(~self.on_ring)
        seconds = self.table.times[0, local]
        self._add_local_waves(float(seconds.sum()))
        wave_of, rank_of = self._fill(local, seconds)
        return self._assemble(request, order, local, wave_of, rank_of, bound)

    def _profile(self) -> list[float]:
        """Falling wave times whose sum is about the mean rank's work.

        A plateau, then pairs of waves that each shrink: in their final order one of a pair stands
        before the plateau and one behind it.
        """
        theta, (ramp, ratio) = self.setting.theta, self.setting.ramp
        in_time = self.allowed <= theta
        width = np.where(in_time.any(0), in_time.argmax(0), self.allowed.argmin(0))
        width[~self.on_ring] = 0
        areas = self.table.areas[width, np.arange(len(width))]
        work = float(areas.sum()) / self.table.num_ranks
        shrinking = [theta * ratio ** (1 + i // 2) for i in range(2 * ramp)]
        plateau = max(1, round((work - sum(shrinking)) / theta))
        return [theta] * plateau + shrinking

    def _add_ring_wave(self, rest: Ints) -> Ints:
        """One more wave for the longest sequences; returns those that are left.

        It takes as long as the profile says, or as the longest sequence at its fastest. Under 1F1B
        a long slot idles between short ones, so it may take longer when rings fill it: then its
        rings are narrower.
        """
        number, grade = len(self.waves), self.setting.grade
        target = self.profile[min(number, len(self.profile) - 1)]
        target = max(target, float(self.allowed[:, rest[0]].min()))
        before = self.waves[max(0, number - 2)].theta if number else 0.0
        theta = max(target, grade * before)
        while True:
            wave, left = self._ring_wave(rest, theta)
            if theta <= target or self._fillable(wave) >= _FILLED * theta:
                self.waves.append(wave)
                return left
            theta = max(target, _SHORTER * theta)

    def _fillable(self, wave: _Wave) -> float:
        """Mean seconds of the ranks when short sequences take all room that rings leave."""
        per_token = float(self.cost.local_s(np.array([1]))[0])
        room = np.maximum(self.table.capacity - wave.tokens, 0) * per_token
        return float(np.minimum(wave.theta, wave.used + room).mean())

    def _ring_wave(self, rest: Ints, theta: float) -> tuple[_Wave, Ints]:
        """Rings side by side, longest sequence first, each stacked up to theta."""
        ranks = self.table.num_ranks
        in_time = self.allowed[:, rest] <= theta * _ROUNDING
        choice = in_time.argmax(0)
        widths = np.where(in_time.any(0), self.table.widths[choice], ranks + 1).tolist()
        wave = _Wave(theta, np.zeros(ranks), np.zeros(ranks, np.int64))
        taken = np.zeros(len(rest), bool)
        low, high = 0, ranks
        for at, width in enumerate(widths):
            if high - low < 2:
                break
            if taken[at] or width > high - low:
                continue
            start = self._start(low, high, width)
            if start == low:
                low += width
            else:
                high = start
            taken[at] = True
            self._put(wave, start, int(choice[at]), at, rest, taken)
        return wave, rest[~taken]

    def _start(self, low: int, high: int, width: int) -> int:
        """Rings of whole nodes from the left; smaller ones from the right, width-aligned."""
        if width >= min(self.cost.ranks_per_node, high) or high - width == low:
            return low
        start = (high - width) // width * width
        return start if start > low else high - width

    def _put(
        self, wave: _Wave, start: int, choice: int, first: int, rest: Ints, taken: NDArray[np.bool_]
    ) -> None:
        """A ring for rest[first], and for as many more as theta and the capacity allow."""
        table, width = self.table, int(self.table.widths[choice])
        row, allowed = table.times[choice, rest], self.allowed[choice, rest]
        sequences = [int(rest[first])]
        seconds, tokens = float(row[first]), table.shard(sequences[0], width)
        at = 0
        while True:
            at = max(at, int(np.searchsorted(-row, -(wave.theta - seconds))))
            at += int(taken[at:].argmin()) if at < len(rest) else 0
            if at >= len(rest) or taken[at] or np.isinf(allowed[at]):
                break
            more = table.shard(int(rest[at]), width)
            if tokens + more > table.room:
                break
            sequences.append(int(rest[at]))
            taken[at] = True
            seconds, tokens = seconds + float(row[at]), tokens + more
        wave.rings.append(_Ring(start, width, sequences))
        wave.used[start : start + width] += seconds
        wave.tokens[start : start + width] += tokens

    def _add_local_wave(self, theta: float) -> None:
        ranks = self.table.num_ranks
        self.waves.append(_Wave(theta, np.zeros(ranks), np.zeros(ranks, np.int64)))

    def _add_local_waves(self, local_s: float) -> None:
        """The rest of the profile, scaled to the local work that the ring waves leave."""
        ranks = self.table.num_ranks
        left = local_s - sum(float((wave.theta - wave.used).sum()) for wave in self.waves)
        rest = self.profile[len(self.waves) :]
        if left <= 0 and self.waves:
            return
        theta = self.setting.theta
        missing = left / ranks - sum(rest)
        rest += [theta] * max(round(missing / theta), 0 if rest else 1)
        scale = left / (ranks * sum(rest))
        for theta in rest:
            self._add_local_wave(theta * scale)

    def _fill(self, local: Ints, seconds: FloatArray) -> tuple[Ints, Ints]:
        """([n] wave, [n] rank) of local sequences: the least loaded rank, its emptiest cell."""
        theta = np.array([wave.theta for wave in self.waves])
        used = np.stack([wave.used for wave in self.waves], axis=1)
        rank_of = longest_first(seconds, used.sum(1))
        left = theta - used
        room = self.table.capacity - np.stack([wave.tokens for wave in self.waves], axis=1)
        # What fits with offload only fills a cell.
        lengths = np.minimum(self.table.lengths[local], self.table.capacity)
        wave_of = np.empty(len(local), np.int64)
        by_rank = np.argsort(rank_of, kind="stable")
        per_rank = np.bincount(rank_of, minlength=len(left))
        first = np.cumsum(per_rank) - per_rank
        for turn in range(int(per_rank.max(initial=0))):
            who = np.flatnonzero(per_rank > turn)
            items = by_rank[first[who] + turn]
            size = lengths[items]
            score = np.where(room[who] >= size[:, None], left[who], -np.inf)
            if np.isneginf(score.max(1)).any():
                more = float(np.median(theta))
                self._add_local_wave(more)
                left = np.column_stack((left, np.full(len(left), more)))
                room = np.column_stack((room, np.full(len(room), self.table.capacity)))
                score = np.where(room[who] >= size[:, None], left[who], -np.inf)
            where = score.argmax(1)
            left[who, where] -= seconds[items]
            room[who, where] -= size
            wave_of[items] = where
        return wave_of, rank_of

    def _assemble(
        self,
        request: StepRequest,
        order: Ints,
        local: Ints,
        wave_of: Ints,
        rank_of: Ints,
        bound: float,
    ) -> Plan:
        """The plan's arrays, in falling length."""
        table, count = self.table, len(order)
        rings = [(ring, number) for number, wave in enumerate(self.waves) for ring in wave.rings]
        seconds = np.stack([wave.used for wave in self.waves], axis=1)
        np.add.at(seconds, (rank_of, wave_of), table.times[0, local])
        slot_of_wave = _slots(seconds.max(0))
        widths = np.array([ring.width for ring, _ in rings], np.int64)
        starts = np.array([ring.start for ring, _ in rings], np.int64)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
        members = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], widths)
        ring_slots = slot_of_wave[np.array([number for _, number in rings], np.int64)]
        ring_of = np.full(count, -1, np.int32)
        for number, (ring, _) in enumerate(rings):
            ring_of[ring.sequences] = number
        all_ranks, slot_of = np.full(count, -1, np.int32), np.empty(count, np.int32)
        all_ranks[local], slot_of[local] = rank_of, slot_of_wave[wave_of]
        on_ring = np.flatnonzero(ring_of >= 0)
        slot_of[on_ring] = ring_slots[ring_of[on_ring]]
        counts = np.ones(table.num_ranks, np.int64)
        np.maximum.at(counts, rank_of, slot_of[local] + 1)
        np.maximum.at(counts, members, np.repeat(ring_slots, widths) + 1)
        counts = equal_counts(counts, self.cost.expert_ranks)
        return Plan(
            step=request.step,
            strategy="auto",
            num_ranks=table.num_ranks,
            capacity=table.capacity,
            ids=np.asarray(request.ids, np.int64)[order],
            lengths=table.lengths,
            ring_of=ring_of,
            rank_of=all_ranks,
            slot_of=slot_of,
            ring_offsets=offsets,
            ring_ranks=members.astype(np.int32),
            ring_slots=ring_slots.astype(np.int32),
            micro_batch_counts=counts.astype(np.int32),
            lower_bound_s=bound,
        )


def _slots(times: FloatArray) -> Ints:
    """[waves] slot of each wave: short ends, the longest in the middle; -1 where nothing runs."""
    rising = np.argsort(times, kind="stable")
    rising = rising[times[rising] > 0]
    slots = np.full(len(times), -1, np.int64)
    slots[np.concatenate((rising[::2], rising[1::2][::-1]))] = np.arange(len(rising))
    return slots
