# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Who did what when in a step, real or simulated, in one form; and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_hdp.planning.values import Plan
from megatron_hdp.simulation import Simulation

Record = dict[str, Any]
_MOST_DRAWN = 64
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
    forwards are recorded.
    """
    spans = []
    pipeline = any(record["pipeline_stage"] for record in records)
    for record in records:
        origin = record["begin_s"]
        starts = [begin for begin, _ in record["forwards"]] + [record["end_s"]]
        # Traces of before interleaved stages have no order: one forward a slot.
        order = record.get("forward_slots") or range(len(record["forwards"]))
        for i, (begin, end) in enumerate(record["forwards"]):
            number = order[i]
            slot = record["slots"][number]
            size = max(1, len(slot["ring"]))
            tokens = slot["ring_tokens"] + slot["local_tokens"]
            where = record["rank"], record["pipeline_stage"], number
            spans.append(Span(*where, "forward", begin - origin, end - origin, size, tokens))
            if not pipeline:
                span = Span(*where, "backward", end - origin, starts[i + 1] - origin, size, tokens)
                spans.append(span)
    return Timeline(title, spans, max(record["end_s"] - record["begin_s"] for record in records))


def of_simulation(
    title: str, plan: Plan, found: Simulation, most_ranks: int = _MOST_TRACED
) -> Timeline:
    """A simulated step; of many ranks some, spread evenly."""
    count = min(plan.num_ranks, most_ranks)
    ring_of = np.ones(int(plan.first_micro_batch[-1]), np.int64)
    slots = np.repeat(plan.ring_slots, plan.ring_sizes)
    ring_of[plan.first_micro_batch[plan.ring_ranks] + slots] = np.repeat(
        plan.ring_sizes, plan.ring_sizes
    )
    spans = []
    for rank in np.linspace(0, plan.num_ranks - 1, count).round().astype(int).tolist():
        first = int(plan.first_micro_batch[rank])
        for stage in range(len(found.busy_s)):
            for slot in range(int(plan.micro_batch_counts[rank])):
                size, tokens = ring_of[first + slot], plan.micro_batch_tokens[first + slot]
                for phase, times in (("forward", found.forward), ("backward", found.backward)):
                    begin, end = (float(part[stage, rank, slot]) for part in times)
                    spans.append(Span(rank, stage, slot, phase, begin, end, int(size), int(tokens)))
    return Timeline(title, spans, found.step_s)


def rows_of(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """(rank, stage) -> row, ranks in order and stages inside them."""
    return {place: i for i, place in enumerate(sorted({(s.rank, s.stage) for s in spans}))}


def label_of(place: tuple[int, int], rows: dict[tuple[int, int], int]) -> str:
    """What a row is called; the stage only where there are several."""
    staged = any(stage for _, stage in rows)
    return f"rank {place[0]} stage {place[1]}" if staged else f"rank {place[0]}"


def draw(
    timelines: Sequence[Timeline], path: str, note: str = "", dots_per_inch: int = 110
) -> None:
    """Writes a PNG: one panel per run, on one time axis; white is waiting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.patches import Patch

    sizes = sorted({span.ring for timeline in timelines for span in timeline.spans})
    color = {size: colormaps["viridis_r"]((i + 1) / (len(sizes) + 1)) for i, size in
             enumerate(sizes)}  # fmt: skip
    heights = [_height(len(rows_of(timeline.spans))) for timeline in timelines]
    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(10, 0.9 + sum(heights)), sharex=True, squeeze=False,
        layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw_panel(axis, timeline, color)
    axes[-1, 0].set_xlabel(f"seconds in the step{note and ' '}{note}")
    handles = [Patch(color=color[s], label="local" if s == 1 else f"ring of {s}") for s in sizes]
    handles += [Patch(color="grey", label="forward"), Patch(color="grey", alpha=0.55,
                label="backward")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)))
    figure.savefig(path, dpi=dots_per_inch)
    pyplot.close(figure)


def _height(rows: int) -> float:
    return 0.9 + (0.45 if rows <= 8 else 0.14) * rows


def _draw_panel(axis: Any, timeline: Timeline, color: dict[int, Any]) -> None:
    rows = rows_of(timeline.spans)
    if len(rows) > _MOST_DRAWN:
        kept = np.linspace(0, len(rows) - 1, _MOST_DRAWN).round().astype(int)
        places = [list(rows)[i] for i in kept]
        rows = {place: i for i, place in enumerate(places)}
    edge = 0.6 if len(rows) <= 8 else 0.15
    for span in timeline.spans:
        row = rows.get((span.rank, span.stage))
        if row is not None:
            axis.barh(
                row, span.end_s - span.begin_s, left=span.begin_s, height=0.8,
                color=color[span.ring], alpha=1.0 if span.phase == "forward" else 0.55,
                edgecolor="white", linewidth=edge,
            )  # fmt: skip
    every = max(1, len(rows) // 12)
    labels = [label_of(place, rows) for place in rows]
    axis.set_yticks(range(0, len(rows), every), labels[::every])
    axis.invert_yaxis()
    axis.set_title(f"{timeline.title}: {timeline.step_s:.2f} s", loc="left", fontsize=10)
