# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Fig. 17: six models, two data sets, four contexts; speedup of each strategy over static."""

from __future__ import annotations

import argparse
from typing import Any

from common import GPUS, TOKENS, setting, write
from pictures import bars, panels, save
from rich.progress import track

from megatron_hdp.planning import PlanError
from megatron_hdp.simulation.batches import draw_steps
from megatron_hdp.simulation.experiment import run_strategy

CONTEXTS = (2**18, 2**19, 2**20, 2**21)
PAPER_2M_GITHUB = {"llama-7b": 7.89, "llama-13b": 6.88, "llama-30b": 6.21, "llama-70b": 4.28,
                   "mistral-8x7b": 3.42, "mistral-8x22b": 4.13}  # fmt: skip


def main() -> None:
    """Every cell; strategies of a cell plan the same steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    cells = [(m, d, c) for m in GPUS for d in ("github", "byted") for c in CONTEXTS]
    rows = []
    for model, data, context in track(cells, "Fig. 17"):
        place = setting(model, context)
        requests = draw_steps(data, context, TOKENS // context, steps, 1)
        found = {}
        for strategy in ("static", "naive", place.balance, "auto"):
            try:
                found[strategy] = run_strategy(place, strategy, requests).step_s
            except PlanError as error:
                print(model, data, context, strategy, error)
        base = found.get("static")
        if base is None:
            continue
        row = {
            "model": model, "data": data, "context": context, "static_step_s": round(base, 2),
            "naive": round(base / found["naive"], 2),
            "balance": round(base / found[place.balance], 2),
            "auto": round(base / found["auto"], 2),
        }  # fmt: skip
        if data == "github" and context == 2**21:
            row["paper_balance"] = PAPER_2M_GITHUB[model]
        rows.append(row)
        write("fig17", {"steps": steps, "rows": rows})
    _draw(rows)


def _draw(rows: list[dict[str, Any]]) -> None:
    """Six models by two data sets, as the paper has them; its placed labels are grey."""
    figure, axes = panels(6, 2, 10, 12)
    for line, model in enumerate(GPUS):
        for column, data in enumerate(("github", "byted")):
            mine = [row for row in rows if (row["model"], row["data"]) == (model, data)]
            axis = axes[line, column]
            groups = [f"{row['context'] // 1024}K" for row in mine]
            bars(axis, groups, {
                "paper, balanced": [row.get("paper_balance") for row in mine],
                **{name: [row[key] for row in mine] for name, key in
                   (("naive", "naive"), ("balanced", "balance"), ("auto", "auto"))},
            })  # fmt: skip
            axis.set_title(f"{model}, {data}", fontsize=8)
    figure.supxlabel("context (tokens)", fontsize=9)
    figure.supylabel("speedup over the static mesh, simulated", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    save(figure, "paper-fig17")


if __name__ == "__main__":
    main()
