# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`auto` under pipeline stages: waves of equal time, the same slot on every pipeline.

Under 1F1B a slot's time matters together with its neighbours', and a ring needs one slot on all its
members. So all pipelines run the same list of waves, each about as long on every rank, with
neighbours alike and both ends short (little fill and drain). How long waves are is searched for:
some settings are tried, then the best one's neighbours, each judged by replaying the whole plan.
"""

from __future__ import annotations

import numpy as np

from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.naive import check_fits
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.slot_order import with_better_order
from megatron_hdp.planning.values import Plan
from megatron_hdp.planning.wave_building import Setting, WaveBuilder
from megatron_hdp.planning.widths import WidthTable

_THETAS = (0.25, 0.4, 0.6, 0.8, 1.0, 1.4)
"""Wave times over a full micro-batch of short sequences."""
_GROWTHS = (0.1, 0.4, 1.0)
_RAMPS = ((2, 0.5), (3, 0.65), (4, 0.65), (4, 0.75), (6, 0.75), (8, 0.8))
_GRADES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
_GRAINS = (1.0, 0.7, 0.5)

_Point = tuple[int, ...]
"""One setting, as an index into each of the lists above."""
_STARTS: tuple[_Point, ...] = ((3, 2, 4, 0, 0), (1, 1, 5, 0, 0), (4, 0, 4, 3, 0), (2, 2, 5, 3, 0))
_MOST_TRIES = 40

# Without pipeline stages nothing fills or drains: waves may have no short ends at all.
_FLAT_RAMPS = ((0, 1.0), *_RAMPS)
_FLAT_STARTS: tuple[_Point, ...] = (
    (3, 2, 0, 0, 0), (1, 1, 6, 0, 0), (4, 0, 0, 3, 0), (2, 2, 6, 3, 0), (3, 2, 3, 0, 0),
    (1, 1, 2, 0, 0),
)  # fmt: skip
_MOST_FLAT_TRIES = 60


def plan_waves(config: PlannerConfig, request: StepRequest) -> Plan:
    """The best of the settings tried, by replayed step time, its slots put in a better order.

    Raises:
        PlanError: a sequence does not fit the domain.
    """
    cost, depth = config.cost(), config.pipeline_depth
    check_fits(np.asarray(request.lengths, np.int64), config)
    best = _Search(config, request).run()
    reordered = with_better_order(best, cost, depth)
    return min((best, reordered), key=lambda plan: replay(plan, cost, depth).step_s)


class _Search:
    """From the best of a few settings to its best neighbour, as long as that helps."""

    def __init__(self, config: PlannerConfig, request: StepRequest) -> None:
        self.config, self.request, self.cost = config, request, config.cost()
        lengths = np.asarray(request.lengths, np.int64)
        self.order = np.argsort(-lengths, kind="stable")
        self.bound = lower_bound(
            lengths, config.num_ranks, config.room, self.cost, config.pipeline_depth
        )
        self.table = WidthTable(config, self.cost, lengths[self.order])
        flat = config.pipeline_depth == 1
        self.ramps = _FLAT_RAMPS if flat else _RAMPS
        self.starts, self.most_tries = (
            (_FLAT_STARTS, _MOST_FLAT_TRIES) if flat else (_STARTS, _MOST_TRIES)
        )
        self.full = float(self.cost.local_s(np.array([1]))[0]) * config.capacity
        self.tried: dict[_Point, float] = {}
        self.best: tuple[float, _Point, Plan] | None = None

    def run(self) -> Plan:
        """The best plan found; deterministic."""
        for point in self.starts:
            self._try(point)
        assert self.best is not None
        while True:
            before = self.best[0]
            for point in self._neighbours(self.best[1]):
                self._try(point)
            if self.best[0] >= before:
                return self.best[2]

    def _try(self, point: _Point) -> None:
        if point in self.tried or len(self.tried) >= self.most_tries:
            return
        theta, growth, ramp, grade, grain = point
        setting = Setting(
            _THETAS[theta] * self.full, _GROWTHS[growth], self.ramps[ramp], _GRADES[grade],
            _GRAINS[grain],
        )  # fmt: skip
        builder = WaveBuilder(self.table, self.cost, setting)
        plan = builder.build(self.request, self.order, self.bound)
        step_s = replay(plan, self.cost, self.config.pipeline_depth).step_s
        self.tried[point] = step_s
        if self.best is None or step_s < self.best[0]:
            self.best = step_s, point, plan

    def _neighbours(self, point: _Point) -> list[_Point]:
        """Settings that differ by one place in one list."""
        sizes = (len(_THETAS), len(_GROWTHS), len(self.ramps), len(_GRADES), len(_GRAINS))
        found = []
        for dimension, size in enumerate(sizes):
            for moved in (point[dimension] - 1, point[dimension] + 1):
                if 0 <= moved < size:
                    found.append((*point[:dimension], moved, *point[dimension + 1 :]))
        return found
