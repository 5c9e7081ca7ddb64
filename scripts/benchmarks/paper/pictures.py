# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The pictures of this folder: bars with the paper's numbers beside ours, in docs/figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

FIGURES = Path(__file__).resolve().parents[3] / "docs" / "figures"
COLOURS = {"paper": "#b0b0b0", "static": "#4d4d4d", "naive": "#e0a030", "balanced": "#3b75af",
           "auto": "#2a9d5c", "ours": "#3b75af", "ours, half the host link": "#2a9d5c"}  # fmt: skip


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """(figure, axes [rows, columns]) of that many inches."""
    return pyplot.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )


def save(figure: Any, name: str) -> None:
    """Writes docs/figures/`name`.png."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=100)
    pyplot.close(figure)


def bars(
    axis: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    upright: bool = False,
) -> None:
    """Grouped bars with their values on top; None leaves a gap.

    Args:
        upright: values stand on end, for bars narrower than a value.
    """
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        there = [(x, value) for x, value in zip(at, values, strict=True) if value is not None]
        drawn = axis.bar(
            [x for x, _ in there], [value for _, value in there], width, label=name,
            color=COLOURS.get(name, COLOURS.get(name.split(",")[0])),
        )  # fmt: skip
        axis.bar_label(drawn, fmt="%.3g", fontsize=6, rotation=90 if upright else 0, padding=2)
    axis.margins(y=0.15 if upright else 0.08)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
