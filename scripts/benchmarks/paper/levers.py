# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 17's published cells (2M, GitHub) with one assumption changed at a time."""

from __future__ import annotations

import argparse
from typing import Any

from common import GPUS, TOKENS, setting, write
from fig17 import PAPER_2M_GITHUB
from rich.progress import track

from megatron_hdp.planning import PlanError
from megatron_hdp.simulation import ModelShape
from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import run_strategy

CONTEXT = 2**21
CHANGES: dict[str, dict[str, Any]] = {
    "as inferred": {},
    "network half": {"nic_bytes_s": 5.1e9},
    "network double": {"nic_bytes_s": 2.04e10},
    "GPU half": {"attention_flops_s": 4.9e13, "matmul_flops_s": 5.85e13},
    "TP double": {},
    "TP half": {},
}


def variant(model: str, title: str, steps: int) -> dict[str, float] | None:
    """Speedups over static; None where the model cannot be cut so."""
    shape = ModelShape.load(model)
    scale = {"TP double": 2.0, "TP half": 0.5}.get(title, 1.0)
    tensor = int(shape.tensor_parallel * scale)
    if not 1 <= tensor <= 8:
        return None
    place = setting(model, CONTEXT, mesh=(tensor, shape.pipeline_parallel), **CHANGES[title])
    requests = draw_steps("github", CONTEXT, TOKENS // CONTEXT, steps, 1)
    try:
        base = run_strategy(place, "static", requests).step_s
        return {
            name: round(base / run_strategy(place, strategy, requests).step_s, 2)
            for name, strategy in (("balance", place.balance), ("auto", "auto"))
        }
    except PlanError as error:
        print(model, title, error)
        return None


def main() -> None:
    """Every model and change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    rows = []
    for model in track(GPUS, "levers"):
        shape = ModelShape.load(model)
        rows.append({
            "model": model, "mesh": [shape.tensor_parallel, shape.pipeline_parallel],
            "paper": PAPER_2M_GITHUB[model],
            "speedups": {title: variant(model, title, steps) for title in CHANGES},
        })  # fmt: skip
    write("levers", {"steps": steps, "rows": rows})


if __name__ == "__main__":
    main()
