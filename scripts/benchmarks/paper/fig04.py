# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 4: the length generators against every statement of the text (sections 3.1 and 8.2)."""

from __future__ import annotations

import numpy as np
from common import write
from pictures import bars, panels, save

from megatron_hdp.planning.distributions import draw

K = 1024


def main() -> None:
    """Draws four billion tokens of each set and compares."""
    byted, github = (draw(name, 4 * 10**9, 2**21, 1) for name in ("byted", "github"))

    def of_tokens(lengths: np.ndarray, least: int) -> float:
        return float(lengths[lengths >= least].sum() / lengths.sum())

    rows = [
        ("Byted: samples up to 4K", 0.80, float((byted <= 4 * K).mean())),
        ("Byted: samples of 2M", 0.0005, float((byted >= 2**21).mean())),
        ("Byted: tokens in samples of 2M", 0.121, of_tokens(byted, 2**21)),
        ("Byted: samples of 128K and more", 0.01, float((byted >= 128 * K).mean())),
        ("Byted: tokens in samples of 128K and more", 0.443, of_tokens(byted, 128 * K)),
        ("Byted: tokens in sequences over 256K", 0.37, of_tokens(byted, 256 * K)),
        ("GitHub: tokens in sequences over 128K", 0.162, of_tokens(github, 128 * K)),
        ("GitHub: tokens in sequences over 256K", 0.098, of_tokens(github, 256 * K)),
    ]
    _draw(byted, github)
    write("fig04", {"rows": [dict(zip(("statement", "paper", "ours"), r, strict=True))
                             for r in rows]})  # fmt: skip


def _draw(byted: np.ndarray, github: np.ndarray) -> None:
    """Shares of samples and of tokens by length, in the paper's bins."""
    edges = np.array([0, *(K * 2**i for i in range(2, 12)), 2**62])
    names = ["<4K", *(f"{2**i}K" for i in range(2, 10)), "1M", "2M"]
    figure, axes = panels(1, 2, 9, 2.8)
    for axis, title, weigh in (
        (axes[0, 0], "samples (%)", False),
        (axes[0, 1], "tokens (%)", True),
    ):
        series = {}
        for name, lengths in (("GitHub", github), ("Byted", byted)):
            weights = lengths if weigh else None
            held, _ = np.histogram(lengths, edges, weights=weights)
            series[name] = (100 * held / held.sum()).round(2).tolist()
        bars(axis, names, series, upright=True)
        axis.set_xlabel("length up to the next bin (tokens)")
        axis.set_ylabel(title)
        axis.legend(fontsize=7)
    save(figure, "paper-fig04")


if __name__ == "__main__":
    main()
