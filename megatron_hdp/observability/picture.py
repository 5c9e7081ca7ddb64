# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Timelines as a picture: a panel per run on one time axis, coloured by ring size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hdp.observability.page import write_page
from megatron_hdp.observability.timeline import (
    Timeline,
    gap_of,
    has_backwards,
    label_of,
    rows_of,
    titles,
)

_MOST_DRAWN = 64
_MOST_LABELS = 16


def draw(
    timelines: Sequence[Timeline],
    path: str,
    *,
    heading: str = "",
    note: str = "",
    axis: str = "time in the step",
    dots_per_inch: int = 110,
) -> None:
    """Writes `path`, a .png or a self-contained .html.

    Args:
        timelines: the first is what the others are compared with.
        heading: the picture's title, and a note under it.
        axis: what the time axis says.

    Raises:
        ValueError: another ending.
    """
    if path.endswith(".html"):
        write_page(timelines, path, heading or "HDP timeline", note, axis)
    elif path.endswith(".png"):
        figure = _figure(timelines, heading, note, axis)
        figure.savefig(path, dpi=dots_per_inch)
    else:
        raise ValueError(f"{path}: the name must end in .png or .html")


def _figure(timelines: Sequence[Timeline], heading: str, note: str, axis: str) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    sizes = sorted({span.ring for timeline in timelines for span in timeline.spans})
    color = {size: colormaps["viridis_r"]((i + 1) / (len(sizes) + 1)) for i, size in
             enumerate(sizes)}  # fmt: skip
    drawn = [_drawn_rows(timeline) for timeline in timelines]
    heights = [_height(len(rows)) for rows in drawn]
    handles = _key(timelines, color)
    lines = -(-len(handles) // 7)  # more columns than seven are wider than the figure
    columns = -(-len(handles) // lines)
    figure = Figure((10, 0.9 + 0.25 * lines + sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights
    )  # fmt: skip
    longest_s = max(timeline.step_s for timeline in timelines)
    scale, unit = (1.0, "s") if longest_s >= 0.1 else (1e3, "ms")
    named = zip(axes[:, 0], timelines, titles(timelines), drawn, strict=True)
    for panel, timeline, title, rows in named:
        _draw_panel(panel, timeline, rows, color, scale)
        panel.set_title(title, loc="left", fontsize=10)
    panel.set_xlabel(f"{axis} ({unit})")
    panel.set_xlim(0, 1.01 * scale * longest_s)
    title = "\n".join(filter(None, (heading, note)))
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _key(timelines: Sequence[Timeline], color: dict[int, Any]) -> list[Any]:
    """The legend: ring sizes, then what shades, gaps and the line mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    looks: list[tuple[str, dict[str, Any]]] = [
             ("forward", {"color": "grey"}), ("backward", {"color": "grey", "alpha": 0.55}),
             (gap_of(timelines), {"facecolor": "white", "edgecolor": "grey"})]  # fmt: skip
    return [
        *(Patch(color=color[s], label="local" if s == 1 else f"ring of {s}") for s in color),
        *(Patch(label=label, **look) for label, look in looks
          if label != "backward" or has_backwards(timelines)),
        Line2D([], [], color="tab:red", linestyle="--", linewidth=1, label="the step's end"),
    ]  # fmt: skip


def _height(rows: int) -> float:
    return 0.5 + (0.45 if rows <= 8 else max(0.09, 3.6 / rows)) * rows


def _drawn_rows(timeline: Timeline) -> dict[tuple[int, int], int]:
    rows = rows_of(timeline.spans)
    if len(rows) <= _MOST_DRAWN:
        return rows
    kept = np.linspace(0, len(rows) - 1, _MOST_DRAWN).round().astype(int)
    places = [list(rows)[i] for i in kept]
    return {place: i for i, place in enumerate(places)}


def _draw_panel(
    axis: Any,
    timeline: Timeline,
    rows: dict[tuple[int, int], int],
    color: dict[int, Any],
    scale: float,
) -> None:
    edge = 0.6 if len(rows) <= 8 else 0.15
    looks: dict[tuple[int, str], list[tuple[int, float, float]]] = {}
    for span in timeline.spans:
        row = rows.get((span.rank, span.stage))
        if row is not None:
            bar = row, scale * span.begin_s, scale * (span.end_s - span.begin_s)
            looks.setdefault((span.ring, span.phase), []).append(bar)
    for (ring, phase), found in looks.items():
        at, begins, lengths = zip(*found, strict=True)
        axis.barh(
            at, lengths, left=begins, height=0.8, color=color[ring],
            alpha=1.0 if phase == "forward" else 0.55, edgecolor="white", linewidth=edge,
        )  # fmt: skip
    axis.axvline(scale * timeline.step_s, color="tab:red", linestyle="--", linewidth=1)
    places = list(rows)
    ticks = _labelled(places)
    axis.set_yticks([rows[place] for place in ticks], [label_of(place, rows) for place in ticks])
    axis.set_ylim(len(rows) - 0.4, -0.6)


def _labelled(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows with a label: all, or so many first stages as there is room for."""
    if len(places) <= _MOST_LABELS:
        return places
    first = [place for place in places if place[1] == 0] or places
    return first[:: -(-len(first) // _MOST_LABELS)]
