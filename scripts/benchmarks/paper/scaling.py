# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Planner and simulated step from 1,024 to 16,384 GPUs, tokens per GPU fixed (7B, 2M, Byted)."""

from __future__ import annotations

import time

from common import CAPACITY, setting, write
from pictures import panels, save
from rich.progress import track

from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import run_strategy
from megatron_hdp.simulation.step import simulate


def main() -> None:
    """Eight capacities per rank."""
    rows = []
    for gpus in track((1024, 2048, 4096, 8192, 16384), "scaling"):
        place = setting("llama-7b", 2**21, gpus)
        requests = draw_steps("byted", 2**21, 8 * place.num_ranks * CAPACITY // 2**21, 1, 1)
        run = run_strategy(place, "auto", requests)
        begun = time.process_time()
        simulate(run.plans[0], place.job, place.cluster)
        rows.append(
            {
                "gpus": gpus, "sequences": len(requests[0].lengths),
                "step_s": round(run.step_s, 1),
                "computing_share": round(run.as_dict()["shares"]["compute"], 3),
                "planner_cpu_s": round(run.planner_s, 2),
                "simulator_cpu_s": round(time.process_time() - begun, 2),
            }
        )  # fmt: skip
    write("scaling", {"rows": rows})
    figure, axes = panels(1, 1, 5, 2.6)
    sizes = [row["gpus"] for row in rows]
    for key, label in (("step_s", "step"), ("planner_cpu_s", "planner, CPU"),
                       ("simulator_cpu_s", "simulator, CPU")):  # fmt: skip
        axes[0, 0].loglog(sizes, [row[key] for row in rows], marker="o", label=label)
    axes[0, 0].set_xticks(sizes, [str(count) for count in sizes])
    axes[0, 0].set_xlabel("GPUs")
    axes[0, 0].set_ylabel("seconds")
    axes[0, 0].legend(fontsize=7)
    save(figure, "paper-scaling")


if __name__ == "__main__":
    main()
