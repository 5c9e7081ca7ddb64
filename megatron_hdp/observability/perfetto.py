# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Trace-event JSON, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_hdp.observability.timeline import (
    Record,
    Timeline,
    label_of,
    of_records,
    rows_of,
)

Event = dict[str, Any]
_MIB = 2**20


def write_chrome(timelines: Iterable[Timeline], path: str) -> None:
    """One step of each run: a process per run, a thread per stage of a rank."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines):
        events += _head(process, timeline) + _spans(process, timeline, 0.0, {})
    _write(events, path)


def write_runs(runs: Sequence[tuple[str, Mapping[int, list[Record]]]], path: str) -> None:
    """All steps of each run behind one another, as time went by on its first rank.

    Inside a step every rank's clock starts with its own step, so hosts whose clocks differ do no
    harm. The first row of a run shows its steps with their numbers.
    """
    events: list[Event] = []
    for process, (title, steps) in enumerate(runs):
        begin_s = steps[min(steps)][0]["begin_s"]
        for step, records in sorted(steps.items()):
            timeline = of_records(title, records)
            offset_s = records[0]["begin_s"] - begin_s
            if step == min(steps):
                events += _head(process, timeline)
                events.append(_name("thread_name", process, _steps_row(timeline), "steps"))
            events += _spans(process, timeline, offset_s, {"step": step})
            events.append(_step(process, timeline, offset_s, records))
    _write(events, path)


def _head(process: int, timeline: Timeline) -> list[Event]:
    rows = rows_of(timeline.spans)
    names = [_name("process_name", process, 0, timeline.title)]
    return names + [
        _name("thread_name", process, row, label_of(place, rows)) for place, row in rows.items()
    ]


def _spans(process: int, timeline: Timeline, offset_s: float, more: dict[str, Any]) -> list[Event]:
    rows = rows_of(timeline.spans)
    return [
        {
            "ph": "X", "pid": process, "tid": rows[span.rank, span.stage],
            "name": f"{span.phase} {span.slot}",
            "cat": "local" if span.ring == 1 else f"ring of {span.ring}",
            "ts": 1e6 * (offset_s + span.begin_s), "dur": 1e6 * (span.end_s - span.begin_s),
            "args": {"slot": span.slot, "ring": span.ring, "tokens": span.tokens, **more},
        }
        for span in timeline.spans
    ]  # fmt: skip


def _steps_row(timeline: Timeline) -> int:
    return len(rows_of(timeline.spans))


def _step(process: int, timeline: Timeline, offset_s: float, records: list[Record]) -> Event:
    tokens = sum(record["loss_tokens"] for record in records)
    loss = sum(record["loss_sum"] for record in records)
    name = f"step {records[0]['step']}"
    return {
        "ph": "X", "pid": process, "tid": _steps_row(timeline), "name": name,
        "cat": records[0]["strategy"], "ts": 1e6 * offset_s, "dur": 1e6 * timeline.step_s,
        "args": {
            "strategy": records[0]["strategy"],
            "loss": loss / tokens if tokens else None,
            "over rings (MiB)": sum(record["ring_bytes"] for record in records) / _MIB,
            "offloaded (MiB)": sum(record["offloaded_bytes"] for record in records) / _MIB,
            **{
                f"longest exposed {what} (ms)": 1e3 * max(r[f"exposed_{what}_s"] for r in records)
                for what in ("planning", "loading")
                if f"exposed_{what}_s" in records[0]  # older traces have one wait for both
            },
        },
    }  # fmt: skip


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _write(events: list[Event], path: str) -> None:
    with open(path, "w") as stream:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, stream)
