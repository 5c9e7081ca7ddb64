# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What sharing experts costs in a plan: replayed step over the dense lower bound.

    python scripts/benchmarks/experts.py    # a minute, one core; results/experts.json

Event replay of the cost model's estimates: nothing runs on a GPU.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_hdp.planning import PlannerConfig, StepRequest, plan_step
from megatron_hdp.planning.bounds import lower_bound
from megatron_hdp.planning.distributions import draw
from megatron_hdp.planning.laminar import plan_laminar
from megatron_hdp.planning.replay import replay
from megatron_hdp.planning.waves import plan_waves

RESULT = Path(__file__).parent / "results" / "experts.json"
CAPACITY, SEED = 8192, 5


def row(name: str, ranks: int, experts: int) -> dict[str, object]:
    """One cell: ratios of the planners to the bound of the same lengths without experts."""
    lengths = draw(name, 8 * CAPACITY * ranks, CAPACITY * ranks, SEED)
    request = StepRequest(np.arange(len(lengths)), lengths)
    dense = PlannerConfig(num_ranks=ranks, capacity=CAPACITY)
    shared = PlannerConfig(num_ranks=ranks, capacity=CAPACITY, expert_ranks=experts)
    bound = lower_bound(lengths, ranks, CAPACITY, dense.cost())
    plans = {"blocks": plan_laminar(shared, request), "waves": plan_waves(shared, request)}
    auto = plan_step(shared, request)
    return {
        "lengths": name,
        "ranks": ranks,
        "expert_ranks": experts,
        "dense": replay(plan_step(dense, request), dense.cost()).step_s / bound,
        **{key: replay(plan, shared.cost()).step_s / bound for key, plan in plans.items()},
        "auto": replay(auto, shared.cost()).step_s / bound,
        "slots": int(auto.micro_batch_counts.max()),
    }


def main() -> None:
    """Runs all cells, prints the table, writes the file."""
    cells = [(8, 8), (64, 8), (64, 64)]
    todo = [(name, *cell) for name in ("wikipedia", "prolong", "byted") for cell in cells]
    rows = [row(*cell) for cell in track(todo, "planning", console=Console(stderr=True))]
    table = Table(title="step / dense lower bound (event replay)")
    for heading in rows[0]:
        table.add_column(heading)
    for found in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in found.values()))
    Console().print(table)
    date = datetime.now(UTC).date().isoformat()
    text = json.dumps({"what": __doc__, "date": date, "seed": SEED, "rows": rows}, indent=1)
    RESULT.write_text(text + "\n")


if __name__ == "__main__":
    main()
