# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 21: offload at a context of 64K, simulated: step time and memory by ratio, and recompute.

Every micro-batch is one sequence on a ring of the 7B model, 16K tokens a rank: what the published
memory implies. That memory holds weights and optimizer, which the paper does not state: they are
what makes its unoffloaded 59 GB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from common import setting, write
from pictures import bars, panels, save

from megatron_hdp.planning import StepRequest, plan_step
from megatron_hdp.simulation.step import simulate

CONTEXT, TOKENS, SEQUENCES = 2**16, 2**14, 8
RATIOS = (0.0, 0.5, 0.6, 0.8, 1.0)
PAPER = {"0.0": (5.08, 59), "0.5": (5.08, 40), "0.6": (5.38, 37), "0.8": (5.93, 33),
         "1.0": (6.49, 27), "recompute": (6.70, 27)}  # fmt: skip


def run(context: int, ratio: float | None, **changes: Any) -> tuple[float, float, float]:
    """(seconds, activation bytes at the peak, host bytes at the peak) of a GPU; None: recompute."""
    place = setting("llama-7b", context, 2 * max(4, context // TOKENS), **changes)
    lengths = np.full(SEQUENCES, context)
    offsets = np.arange(SEQUENCES + 1)
    request = StepRequest(np.arange(SEQUENCES), lengths, offsets)
    place = replace(place, capacity=TOKENS)
    config = replace(place.planner("static", request), offload_ratio=ratio or 0.0)
    plan = plan_step(config, request)
    job = replace(place.job, parameters=0.0)
    if ratio is None:
        cost = place.cost
        more = cost.forward_share  # forward runs again
        job = replace(job, cost=replace(
            cost, attention_s=(1 + more) * cost.attention_s, linear_s=(1 + more) * cost.linear_s,
            forward_share=more / (1 + more), activation_bytes=2.0 * 4096,
        ))  # fmt: skip
    found = simulate(plan, job, place.cluster)
    return (found.step_s, float(found.activation_peak_bytes.max()),
            float(found.host_peak_bytes.max()))  # fmt: skip


def sweep(context: int, **changes: Any) -> dict[str, dict[str, float]]:
    """Relative time, and GB with the rest that the paper's number leaves for weights."""
    plain_s, plain_bytes, _ = run(context, 0.0, **changes)
    found = {}
    for name, ratio in [*((str(r), r) for r in RATIOS), ("recompute", None)]:
        seconds, saved, host = run(context, ratio, **changes)
        found[name] = {
            "time": round(seconds / plain_s, 3),
            "activations_gb": round(saved / 1e9, 1),
            "memory_gb": round(59 - (plain_bytes - saved) / 1e9, 1),
            "host_gb": round(host / 1e9, 1),
        }
    return found


def main() -> None:
    """As inferred, with a slower and a faster way to the host, and at 256K."""
    ours = sweep(CONTEXT)
    variants = {
        "host link as inferred": ours,
        "host link at half speed": sweep(CONTEXT, host_bytes_s=7e10),
        "host link at twice the speed": sweep(
            CONTEXT, host_bytes_s=2.8e11, host_copy_bytes_s=4.4e10
        ),
    }
    half = variants["host link at half speed"]
    base = PAPER["0.0"][0]
    figure, axes = panels(1, 2, 8, 2.8)
    names = list(PAPER)
    bars(
        axes[0, 0],
        names,
        {
            "paper": [s / base for s, _ in PAPER.values()],
            "ours": [ours[name]["time"] for name in names],
            "ours, half the host link": [half[name]["time"] for name in names],
        },
        upright=True,
    )
    bars(axes[0, 1], names, {"paper": [gb for _, gb in PAPER.values()],
                             "ours": [ours[name]["memory_gb"] for name in names]})  # fmt: skip
    axes[0, 0].set_ylim(0, 2.0)
    axes[0, 0].set_ylabel("step time / without offload")
    axes[0, 1].set_ylabel("memory of a GPU (GB)")
    for axis in axes[0]:
        axis.set_xlabel("offload ratio (64K, simulated)")
        axis.legend(fontsize=7, loc="upper left" if axis is axes[0, 0] else "upper right")
    save(figure, "paper-fig21")
    write("fig21", {
        "paper": {name: {"time": round(s / base, 3), "memory_gb": gb}
                  for name, (s, gb) in PAPER.items()},
        "ours": variants,
        "256K, host link at half speed": sweep(2**18, host_bytes_s=7e10),
    })  # fmt: skip


if __name__ == "__main__":
    main()
