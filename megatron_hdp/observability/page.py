# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Timelines as one self-contained HTML file: hover, zoom, a panel per run on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from megatron_hdp.observability.timeline import (
    Timeline,
    gap_of,
    has_backwards,
    label_of,
    rows_of,
    titles,
)


def write_page(
    timelines: Sequence[Timeline], path: str, heading: str, note: str, axis: str
) -> None:
    """Writes `path`; it needs no network and no other file.

    Args:
        heading: the page's title.
        note: a line under it.
        axis: what the time axis says.
    """
    data = {
        "heading": heading, "note": note, "axis": axis,
        "gap": gap_of(timelines), "backwards": has_backwards(timelines),
        "panels": [_panel(timeline, title) for timeline, title in
                   zip(timelines, titles(timelines), strict=True)],
    }  # fmt: skip
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # ends no <script>
    page = resources.files(__package__).joinpath("page.html").read_text()
    with open(path, "w") as stream:
        stream.write(page.replace("/*DATA*/", text))


def _panel(timeline: Timeline, title: str) -> dict[str, Any]:
    """A span is [row, begin, end, 1 if backward, ring, tokens, slot], seconds to a microsecond."""
    rows = rows_of(timeline.spans)
    return {
        "title": title,
        "step_s": timeline.step_s,
        "rows": [label_of(place, rows) for place in rows],
        "stages": 1 + max(stage for _, stage in rows),
        "spans": [
            [rows[s.rank, s.stage], round(s.begin_s, 6), round(s.end_s, 6),
             int(s.phase == "backward"), s.ring, s.tokens, s.slot] for s in timeline.spans
        ],
    }  # fmt: skip
