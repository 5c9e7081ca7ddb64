# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a viewer of trace events demands of a file, as its readers refuse or misplace the rest."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NAME = {"ph", "pid", "tid", "name", "args"}
SPAN = NAME | {"cat", "ts", "dur"}


def check_trace(path: Path) -> dict[str, dict[str, list[Event]]]:
    """Process name -> row name -> its events in order, after every demand was checked.

    Complete events and names only (so there are no begin/end or flow ids to pair); whole
    microseconds; each process and row named once; nothing on a row overlaps; a step's events lie
    inside that step's own.
    """
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    processes = _only(events, "process_name", "pid")
    rows = _only(events, "thread_name", "pid", "tid")
    order = _only(events, "thread_sort_index", "pid", "tid")
    assert sorted(processes) == list(range(1, 1 + len(processes)))
    assert order.keys() == rows.keys()
    assert len(set(order.values())) == len(order)
    assert len({tid for _, tid in rows}) == len(rows), "a thread number stands for two rows"
    assert not any(pid == tid for pid, tid in rows), "viewers would move it to the top"
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert set(event) == {"M": NAME, "X": SPAN}[event["ph"]]
        if event["ph"] == "X":
            _check_span(event)
            found[event["pid"], event["tid"]].append(event)
    assert found.keys() == rows.keys(), "a row has no name or no event"
    result: dict[str, dict[str, list[Event]]] = {name: {} for name in processes.values()}
    assert len(result) == len(processes), "two processes have one name"
    for place in sorted(rows, key=order.__getitem__):
        line = sorted(found[place], key=lambda event: (event["ts"], event["dur"]))
        for one, other in pairwise(line):
            assert one["ts"] + one["dur"] <= other["ts"], f"{rows[place]}: {one} overlaps {other}"
        assert rows[place] not in result[processes[place[0]]], "two rows have one name"
        result[processes[place[0]]][rows[place]] = line
    for lines in result.values():
        _check_steps(lines)
    return result


def _only(events: list[Event], kind: str, *keys: str) -> dict[Any, Any]:
    """The one argument of all metadata events of that kind, by place."""
    given = [e for e in events if e["ph"] == "M" and e["name"] == kind]
    found = {
        tuple(e[key] for key in keys) if len(keys) > 1 else e[keys[0]]: next(
            iter(e["args"].values())
        )
        for e in given
    }
    assert len(found) == len(given) > 0, f"{kind} is given twice or never"
    return found


def _check_span(event: Event) -> None:
    assert all(type(event[key]) is int for key in ("pid", "tid", "ts", "dur"))
    assert event["ts"] >= 0
    assert event["dur"] >= 0
    args = event["args"]
    if event["name"].startswith("step "):
        assert set(args) >= {"strategy", "loss", "over rings (MiB)", "offloaded (MiB)"}
        return
    phase, slot = event["name"].split()
    assert phase in {"forward", "backward"}
    assert int(slot) == args["slot"] >= 0
    assert event["cat"] == ("local" if args["ring"] == 1 else f"ring of {args['ring']}")
    assert set(args) - {"step"} == {"slot", "ring", "tokens"}


def _check_steps(lines: dict[str, list[Event]]) -> None:
    if "steps" not in lines:
        return
    assert next(iter(lines)) == "steps", "the steps' row is not the first"
    steps = {event["name"]: event for event in lines["steps"]}
    for row, line in lines.items():
        for event in line if row != "steps" else []:
            step = steps[f"step {event['args']['step']}"]
            assert step["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= step["ts"] + step["dur"]
