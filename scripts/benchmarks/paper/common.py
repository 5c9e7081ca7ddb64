# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share. Everything here is simulated; nothing ran on a GPU."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_hdp.simulation import Cluster, ModelShape
from megatron_hdp.simulation.experiment import Setting, make_setting

RESULTS = Path(__file__).resolve().parents[1] / "results" / "paper"
GPUS = {"llama-7b": 1024, "llama-13b": 2048, "llama-30b": 4096, "llama-70b": 8192,
        "mistral-8x7b": 8192, "mistral-8x22b": 12288}  # fmt: skip
CLUSTER = "bytescale-inferred"
CAPACITY = 8192
TOKENS = 2**25


def setting(
    model: str,
    context: int,
    gpus: int | None = None,
    mesh: tuple[int, int] | None = None,
    **changes: Any,
) -> Setting:
    """A model of Table 1 on the paper's number of GPUs.

    Args:
        mesh: (TP, PP) in place of the assumed ones; changes: to the cluster.
    """
    shape, cluster = ModelShape.load(model), replace(Cluster.load(CLUSTER), **changes)
    tensor, pipeline = mesh or (shape.tensor_parallel, shape.pipeline_parallel)
    return make_setting(
        shape.cost_model(cluster, tensor),
        cluster,
        gpus=gpus or GPUS[model],
        pipeline_depth=pipeline,
        context=context,
        capacity=CAPACITY,
        parameters=shape.parameters,
        boundary_bytes=2.0 * shape.hidden,
    )


def write(name: str, result: dict[str, Any]) -> None:
    """Writes results/paper/`name`.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    head = {"what": "simulated, not measured", "date": datetime.date.today().isoformat(),
            "cluster": CLUSTER}  # fmt: skip
    (RESULTS / f"{name}.json").write_text(json.dumps({**head, **result}, indent=1) + "\n")
