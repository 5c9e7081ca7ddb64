# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 12 and 13: timelines of PP-Balance and DP-Balance beside unbalanced plans.

The paper draws sketches; here a small domain with the 7B model runs the same strategies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from common import setting, write
from pictures import FIGURES

from megatron_hdp.observability.picture import draw
from megatron_hdp.observability.timeline import of_plan
from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import run_strategy

CONTEXT = 2**15


def timelines(ranks: int, depth: int, strategies: list[str], name: str, title: str) -> Any:
    """Draws one step of each strategy; returns counts, idle shares and step times."""
    place = replace(setting("llama-7b", CONTEXT, 2 * ranks), pipeline_depth=depth)
    request = draw_steps("byted", CONTEXT, 2 * ranks, 1, 4)
    found, drawn = {}, []
    for strategy in strategies:
        run = run_strategy(place, strategy, request)
        plan, simulation = run.plans[0], run.simulations[0]
        counts = plan.micro_batch_counts
        idle = simulation.pipeline_bubble_s + simulation.data_bubble_s + simulation.ring_wait_s
        found[strategy] = {
            "step_s": round(run.step_s, 2),
            "micro_batches": [int(counts.min()), int(counts.max())],
            "idle_share": round(float(idle.mean()) / run.step_s, 3),
            "busy_max_over_min": round(float(np.max(simulation.busy_s[0])
                                             / np.min(simulation.busy_s[0])), 2),
        }  # fmt: skip
        drawn.append(of_plan(strategy, plan, simulation))
    FIGURES.mkdir(parents=True, exist_ok=True)
    draw(drawn, str(FIGURES / f"{name}.png"), heading=title,
         note="between the last bars and the end of a step: gradients are synchronised",
         axis="time in the step, simulated",
         dots_per_inch=80)  # fmt: skip
    return found


def main() -> None:
    """Fig. 12: 8 pipelines of 4 stages; Fig. 13: 16 ranks without stages."""
    pipeline = timelines(8, 4, ["dp-balance", "pp-balance", "auto"], "paper-fig12",
                         "8 pipelines x 4 stages")  # fmt: skip
    data = timelines(16, 1, ["naive", "dp-balance", "auto"], "paper-fig13", "16 ranks")
    write("fig12_13", {
        "paper": {"fig12_micro_batches": [8, 18]},
        "fig12": pipeline, "fig13": data, "context": CONTEXT,
    })  # fmt: skip


if __name__ == "__main__":
    main()
