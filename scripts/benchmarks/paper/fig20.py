# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 20: the ablation (7B, 2M, Byted, 1,024 GPUs), and what moves it."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import TOKENS, setting, write
from pictures import bars, panels, save

from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import Run, ablation, ablation_strategies, run_strategy

PAPER = {"dynamic": 1.59, "offload": 2.01, "balance": 3.69, "loader": 3.89}
STEPS = 8


def main() -> None:
    """The setting as inferred, then with one assumption changed at a time."""
    requests = draw_steps("byted", 2**21, TOKENS // 2**21, STEPS, 1)
    changes: dict[str, dict[str, Any]] = {
        "as inferred": {},
        "network at half speed": {"nic_bytes_s": 5.1e9},
        "network at twice the speed": {"nic_bytes_s": 2.04e10},
        "half of a ring's transfers not hidden": {"ring_overlap": 0.5},
    }
    variants: dict[str, dict[str, float]] = {}
    runs: dict[str, Run] = {}
    place = setting("llama-7b", 2**21)
    for title, change in changes.items():
        varied = setting("llama-7b", 2**21, **change)
        names = set(ablation_strategies(varied).values())
        found = {name: run_strategy(varied, name, requests) for name in sorted(names)}
        variants[title] = {key: round(value, 2) for key, value in ablation(varied, found).items()}
        runs = runs or found
    # What Algorithm 2 would reach if rings never waited for a member: balanced loads only.
    tokens = np.mean([plan.num_tokens for plan in runs["static"].plans])
    base = runs["static"].step_s + tokens / place.cluster.loader_tokens_s
    busy = [s.busy_s.max() + s.sync_s for s in runs["dp-balance+offload"].simulations]
    rows = {
        name: {
            "step_s": round(run.step_s, 1),
            "busy_max_over_min": round(run.as_dict()["busy_max_over_min"], 2),
            "busy_max_over_mean": round(run.as_dict()["busy_max_over_mean"], 3),
            "exposed_share_of_busy": round(
                run.as_dict()["shares"]["exposed"]
                / (run.as_dict()["shares"]["exposed"] + run.as_dict()["shares"]["compute"]), 3
            ),
            "ring_wait_share": round(run.as_dict()["shares"]["ring_wait"], 3),
        }
        for name, run in runs.items()
    }  # fmt: skip
    _draw(variants["as inferred"])
    write("fig20", {"steps": STEPS, "paper": PAPER, "ablation": variants,
                    "loader_without_ring_waits": round(float(base / np.mean(busy)), 2),
                    "case_study": rows})  # fmt: skip


def _draw(ours: dict[str, float]) -> None:
    """The paper's speedups beside ours."""
    figure, axes = panels(1, 1, 6, 2.8)
    bars(axes[0, 0], list(ours), {"paper": [PAPER.get(key) for key in ours],
                                  "ours, simulated": list(ours.values())})  # fmt: skip
    axes[0, 0].set_xlabel("each with those left of it; auto is ours alone")
    axes[0, 0].set_ylabel("speedup over static")
    axes[0, 0].legend(fontsize=7)
    save(figure, "paper-fig20")


if __name__ == "__main__":
    main()
