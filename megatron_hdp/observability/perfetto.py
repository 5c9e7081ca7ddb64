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
_THREADS = 10_000
"""Thread numbers of a process: unlike its own number, or viewers take one for its main thread."""


def write_chrome(timelines: Iterable[Timeline], path: str) -> None:
    """One step of each run: a process per run, a thread per stage of a rank."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines, start=1):
        events += _head(process, timeline) + _spans(process, timeline, 0.0, {})
    _write(events, path)


def write_runs(runs: Sequence[tuple[str, Mapping[int, list[Record]]]], path: str) -> None:
    """All steps of each run behind one another, as time went by on its first rank.

    Inside a step every rank's clock starts with its own step, so hosts whose clocks differ do no
    harm; a step begins after the end of the one before on every rank, since viewers refuse events
    of a row that overlap. The first row of a run shows its steps with their numbers.
    """
    events: list[Event] = []
    for process, (title, steps) in enumerate(runs, start=1):
        begin_s, over_s = steps[min(steps)][0]["begin_s"], 0.0
        for step, records in sorted(steps.items()):
            timeline = of_records(title, records)
            offset_s = max(over_s, records[0]["begin_s"] - begin_s)
            over_s = offset_s + timeline.step_s
            if step == min(steps):
                events += _head(process, timeline) + _names("thread", process, -1, "steps")
            events += _spans(process, timeline, offset_s, {"step": step})
            events.append(_step(process, timeline, offset_s, records))
    _write(events, path)


def _head(process: int, timeline: Timeline) -> list[Event]:
    rows = rows_of(timeline.spans)
    events = _names("process", process, 0, timeline.title)
    for place, row in rows.items():
        events += _names("thread", process, row, label_of(place, rows))
    return events


def _spans(process: int, timeline: Timeline, offset_s: float, more: dict[str, Any]) -> list[Event]:
    rows = rows_of(timeline.spans)
    return [
        {
            "ph": "X", "pid": process, "tid": _thread(process, rows[span.rank, span.stage]),
            "name": f"{span.phase} {span.slot}",
            "cat": "local" if span.ring == 1 else f"ring of {span.ring}",
            **_time(offset_s + span.begin_s, offset_s + span.end_s),
            "args": {"slot": span.slot, "ring": span.ring, "tokens": span.tokens, **more},
        }
        for span in timeline.spans
    ]  # fmt: skip


def _step(process: int, timeline: Timeline, offset_s: float, records: list[Record]) -> Event:
    tokens = sum(record["loss_tokens"] for record in records)
    loss = sum(record["loss_sum"] for record in records)
    name = f"step {records[0]['step']}"
    return {
        "ph": "X", "pid": process, "tid": _thread(process, -1), "name": name,
        "cat": records[0]["strategy"], **_time(offset_s, offset_s + timeline.step_s),
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


def _time(begin_s: float, end_s: float) -> dict[str, int]:
    """Whole microseconds: what touches in seconds must not overlap by a rounding."""
    begin = round(1e6 * begin_s)
    return {"ts": begin, "dur": round(1e6 * end_s) - begin}


def _thread(process: int, row: int) -> int:
    return _THREADS * process + 1 + row


def _names(kind: str, process: int, row: int, name: str) -> list[Event]:
    """A process's or row's name, and its place among the others; row -1 is the first."""
    thread = _thread(process, row)
    order = thread if kind == "thread" else process
    return [
        {"ph": "M", "pid": process, "tid": thread, "name": f"{kind}_{what}", "args": args}
        for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": order}))
    ]


def _write(events: list[Event], path: str) -> None:
    with open(path, "w") as stream:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, stream)
