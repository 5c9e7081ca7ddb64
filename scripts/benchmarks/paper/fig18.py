# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 18: the case study, 7B, 2M, Byted, 1,024 GPUs: a ring step, rank times, communication."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import CAPACITY, TOKENS, setting, write
from pictures import COLOURS, panels, save

from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import Run, Setting, run_strategy

CONTEXT = 2**21
STRATEGIES = {"static": "static", "naive": "naive", "balanced": "dp-balance", "auto": "auto"}
PAPER = {
    "static step (s)": 520.0, "naive step (s)": 272.0, "balanced step (s)": 157.0,
    "naive, least busy rank (s)": 60.0, "naive, busiest rank (s)": 279.0,
    "naive, standard deviation (s)": 68.0,
    "ring of 256: computing per ring step (ms)": 0.36, "ring of 256: transfer (ms)": 1.58,
    "ring of 39, 312K: computing per ring step (ms)": 2.8,
    "ring of 256: its share of a layer's forward": 0.976,
}  # fmt: skip
"""Step times of the text; a ring step's are the middle of the published ranges."""


def ring_step(place: Setting, length: int, ring: int, whole: bool) -> tuple[float, float]:
    """(computing, transfer) ms of a layer's forward ring step.

    Args:
        whole: the ring's tokens are one sequence; otherwise packs of 8K pieces.
    """
    cost = place.cluster.links_into(place.cost)
    share, tokens = cost.forward_share, length / ring
    squares = float(length) ** 2 if whole else length * float(CAPACITY)
    computing = share * cost.attention_s * squares / ring**2 / cost.tensor_parallel
    moved = cost.ring_bytes / 4 * tokens / cost.tensor_parallel  # K, V of K, V, K, V, dK, dV
    return 1e3 * computing, 1e3 * (moved / cost.across_bytes_s + cost.latency_s)


def case(place: Setting, runs: dict[str, Run]) -> dict[str, float]:
    """Ours for every number of the paper's; rank times are of the first step."""
    busy = runs["naive"].simulations[0].busy_s[0]
    short, transfer = ring_step(place, CONTEXT, CONTEXT // CAPACITY, whole=False)
    long, _ = ring_step(place, 312 * 1024, 39, whole=True)
    cost = place.cost
    rest = cost.forward_share * cost.linear_s * CAPACITY / cost.tensor_parallel
    ring = CONTEXT // CAPACITY * transfer / 1e3
    return {
        "static step (s)": runs["static"].step_s,
        "naive step (s)": runs["naive"].step_s,
        "balanced step (s)": runs["balanced"].step_s,
        "naive, least busy rank (s)": float(busy.min()),
        "naive, busiest rank (s)": float(busy.max()),
        "naive, standard deviation (s)": float(busy.std()),
        "ring of 256: computing per ring step (ms)": short,
        "ring of 256: transfer (ms)": transfer,
        "ring of 39, 312K: computing per ring step (ms)": long,
        "ring of 256: its share of a layer's forward": ring / (ring + rest),
    }


def main() -> None:
    """The picture shows every rank's busy time, sorted, of one step."""
    place = setting("llama-7b", CONTEXT)
    requests = draw_steps("byted", CONTEXT, TOKENS // CONTEXT, 4, 1)
    runs = {name: run_strategy(place, strategy, requests) for name, strategy in STRATEGIES.items()}
    figure, axes = panels(1, 2, 8, 3)
    for name, run in runs.items():
        busy = np.sort(run.simulations[0].busy_s[0])
        # Balanced and auto are one line: dashes let the lower one be seen.
        axes[0, 0].plot(busy, label=name, color=COLOURS[name],
                        linestyle="--" if name == "auto" else "-")  # fmt: skip
        axes[0, 0].axhline(run.simulations[0].step_s, color=COLOURS[name], linewidth=0.6,
                           linestyle=":")  # fmt: skip
    axes[0, 0].set_xlabel("HDP ranks, sorted")
    axes[0, 0].set_ylabel("busy, simulated (s)\nthin dotted line: the step")
    axes[0, 0].legend(fontsize=7, loc="center right")
    _shares(axes[0, 1], runs)
    save(figure, "paper-fig18")
    ours = case(place, runs)
    write("fig18", {"steps": len(requests), "rows": [
        {"number": name, "paper": PAPER[name], "ours": round(value, 3)}
        for name, value in ours.items()
    ]})  # fmt: skip


def _shares(axis: Any, runs: dict[str, Run]) -> None:
    """Where a step's time goes, mean over ranks."""
    parts = {"compute": "computing", "exposed": "transfers", "ring_wait": "ring waits",
             "data_bubble": "DP bubble"}  # fmt: skip
    bottom = np.zeros(len(runs))
    for key, label in parts.items():
        values = np.array([run.as_dict()["shares"][key] * run.step_s for run in runs.values()])
        axis.bar(list(runs), values, bottom=bottom, label=label)
        bottom += values
    axis.set_ylabel("mean of ranks and steps,\nsimulated (s)")
    axis.legend(fontsize=7)


if __name__ == "__main__":
    main()
