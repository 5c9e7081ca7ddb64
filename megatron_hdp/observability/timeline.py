# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Who did what when in a step, real, replayed or simulated, in one form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import Plan

Record = dict[str, Any]
Floats = NDArray[np.float64]
_MOST_TRACED = 1024


class Span(NamedTuple):
    """One micro-batch's forward or backward on one stage of one rank; seconds in the step."""

    rank: int
    stage: int
    slot: int
    phase: str
    begin_s: float
    end_s: float
    ring: int
    """Members; 1 is local."""
    tokens: int


@dataclass(frozen=True)
class Timeline:
    """One step of one run."""

    title: str
    spans: list[Span]
    step_s: float


def load_records(folder: str, kind: str = "train") -> dict[int, list[Record]]:
    """Step -> that step's record (`--hdp-trace`) of every rank, in rank order."""
    steps: dict[int, list[Record]] = {}
    files = sorted(Path(folder).glob("rank*.jsonl"))
    if not files:
        raise SystemExit(f"{folder} holds no rank*.jsonl: train with --hdp-trace {folder}.")
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == kind:
                steps.setdefault(record["step"], []).append(record)
    return steps


def of_records(title: str, records: Sequence[Record]) -> Timeline:
    """A real step. Without pipeline stages a backward follows its forward at once; with them only
    forwards are recorded. Tensor-parallel siblings work in lockstep: the first one's row is shown.
    """
    spans = []
    shown: set[tuple[int, int]] = set()
    pipeline = any(record["pipeline_stage"] for record in records)
    for record in records:
        place = record["rank"], record["pipeline_stage"]
        if place in shown:
            continue
        shown.add(place)
        origin = record["begin_s"]
        starts = [begin for begin, _ in record["forwards"]] + [record["end_s"]]
        # Traces of before interleaved stages have no order: one forward a slot.
        order = record.get("forward_slots") or range(len(record["forwards"]))
        for i, (begin, end) in enumerate(record["forwards"]):
            number = order[i]
            slot = record["slots"][number]
            size = max(1, len(slot["ring"]))
            tokens = slot["ring_tokens"] + slot["local_tokens"]
            where = *place, number
            spans.append(Span(*where, "forward", begin - origin, end - origin, size, tokens))
            if not pipeline:
                span = Span(*where, "backward", end - origin, starts[i + 1] - origin, size, tokens)
                spans.append(span)
    return Timeline(title, spans, max(record["end_s"] - record["begin_s"] for record in records))


class StepTimes(Protocol):
    """A step's times, as replay and simulation give them."""

    @property
    def step_s(self) -> float: ...

    @property
    def forward(self) -> tuple[Floats, Floats]:
        """(start, end), each [p, N, K]."""

    @property
    def backward(self) -> tuple[Floats, Floats]: ...


def of_plan(title: str, plan: Plan, times: StepTimes, most_rows: int = _MOST_TRACED) -> Timeline:
    """A predicted step, all its stages; of many ranks some, spread evenly."""
    stages = len(times.forward[0])
    count = min(plan.num_ranks, max(1, most_rows // stages))
    ring_of = np.ones(int(plan.first_micro_batch[-1]), np.int64)
    slots = np.repeat(plan.ring_slots, plan.ring_sizes)
    ring_of[plan.first_micro_batch[plan.ring_ranks] + slots] = np.repeat(
        plan.ring_sizes, plan.ring_sizes
    )
    spans = []
    for rank in np.linspace(0, plan.num_ranks - 1, count).round().astype(int).tolist():
        first = int(plan.first_micro_batch[rank])
        for stage in range(stages):
            for slot in range(int(plan.micro_batch_counts[rank])):
                size, tokens = ring_of[first + slot], plan.micro_batch_tokens[first + slot]
                for phase, of_phase in (("forward", times.forward), ("backward", times.backward)):
                    begin, end = (float(part[stage, rank, slot]) for part in of_phase)
                    spans.append(Span(rank, stage, slot, phase, begin, end, int(size), int(tokens)))
    return Timeline(title, spans, times.step_s)


def rows_of(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """(rank, stage) -> row, ranks in order and stages inside them."""
    return {place: i for i, place in enumerate(sorted({(s.rank, s.stage) for s in spans}))}


def label_of(place: tuple[int, int], rows: dict[tuple[int, int], int]) -> str:
    """What a row is called; the stage only where there are several."""
    staged = any(stage for _, stage in rows)
    return f"rank {place[0]} stage {place[1]}" if staged else f"rank {place[0]}"


def has_backwards(timelines: Iterable[Timeline]) -> bool:
    """Whether all show backwards; a real step with pipeline stages has recorded none."""
    return all(any(span.phase == "backward" for span in line.spans) for line in timelines)


def gap_of(timelines: Iterable[Timeline]) -> str:
    """What a row's gaps are."""
    return "waiting" if has_backwards(timelines) else "backward (not recorded) or waiting"


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 s, 4.56 ms."""
    value, unit = (seconds, "s") if seconds >= 0.1 else (1000 * seconds, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def titles(timelines: Sequence[Timeline]) -> list[str]:
    """What each panel is called: its step's time, and how that compares with the first one's."""
    first = timelines[0].step_s
    return [
        f"{timeline.title}: {duration(timeline.step_s)}"
        + (f", {first / timeline.step_s:.2f} times as fast" if number else "")
        for number, timeline in enumerate(timelines)
    ]
