# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Writes docs/reproduction.md from results/paper/*.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import RESULTS

from megatron_hdp.simulation import Cluster

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reproduction.md"
STEPS = ("dynamic", "offload", "balance", "loader", "auto")


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def read(name: str) -> dict[str, Any]:
    """One script's result."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def lengths() -> str:
    """Fig. 4."""
    rows = [(r["statement"], f"{100 * r['paper']:g} %", f"{100 * r['ours']:.2f} %")
            for r in read("fig04")["rows"]]  # fmt: skip
    return table(("statement (sections 3.1, 8.2)", "paper", "generator"), rows)


def ablation() -> str:
    """Fig. 20, as inferred and with one assumption changed."""
    found = read("fig20")
    rows = [["paper", *(found["paper"].get(step, "") for step in STEPS)]]
    rows += [[title, *(values[step] for step in STEPS)] for title, values in
             found["ablation"].items()]  # fmt: skip
    return table(("speedup over static", *(f"+{step}" for step in STEPS)), rows)


def case_study() -> str:
    """Fig. 18."""
    paper = {"static": "520 s", "naive+offload": "272 s, spread 4.7", "dp-balance+offload": "157 s"}
    rows = [
        (name, paper.get(name, ""), f"{row['step_s']} s", row["busy_max_over_min"],
         row["busy_max_over_mean"], f"{100 * row['exposed_share_of_busy']:.0f} %",
         f"{100 * row['ring_wait_share']:.0f} %")
        for name, row in sorted(found_rows(), key=lambda item: -item[1]["step_s"])
    ]  # fmt: skip
    return table(("strategy", "paper", "step", "ranks, max / min", "max / mean",
                  "transfers exposed", "ring waits"), rows)  # fmt: skip


def found_rows() -> list[tuple[str, dict[str, Any]]]:
    """Strategies of the case study."""
    return list(read("fig20")["case_study"].items())


def speedups() -> str:
    """Fig. 17."""
    rows = [
        (row["model"], row["data"], f"{row['context'] // 1024}K", row["naive"], row["balance"],
         row.get("paper_balance", ""), row["auto"])
        for row in read("fig17")["rows"]
    ]  # fmt: skip
    head = ("model", "data", "context", "naive", "balanced", "paper, balanced", "auto")
    return table(head, rows)


def scaling() -> str:
    """Beyond the paper."""
    rows = [(f"{r['gpus']:,}", f"{r['sequences']:,}", f"{r['step_s']} s",
             f"{100 * r['computing_share']:.0f} %", f"{r['planner_cpu_s']} s",
             f"{r['simulator_cpu_s']} s") for r in read("scaling")["rows"]]  # fmt: skip
    head = ("GPUs", "sequences", "step", "computing", "planner, CPU", "simulator, CPU")
    return table(head, rows)


def main() -> None:
    """The page."""
    fig20 = read("fig20")
    ours, paper = fig20["ablation"]["as inferred"], fig20["paper"]
    far = [f"{s} {ours[s]} against {paper[s]}" for s in paper if abs(ours[s] / paper[s] - 1) > 0.25]
    text = PAGE.format(
        source=Cluster.load(fig20["cluster"]).source, date=fig20["date"], lengths=lengths(),
        ablation=ablation(), case_study=case_study(), speedups=speedups(), scaling=scaling(),
        steps=fig20["steps"], fig17_steps=read("fig17")["steps"], far="; ".join(far) or "none",
        no_waits=fig20["loader_without_ring_waits"],
    )  # fmt: skip
    DOCS.write_text(text)


PAGE = """# Reproduction

Written by `scripts/benchmarks/paper/all.sh` on {date}. **Everything here is simulated
([how](simulation.md)); nothing ran on a GPU, and the simulator is unchecked against real runs.**
The paper (ByteScale, arXiv 2502.21231) hides its
GPUs, network, TP and PP; `bytescale-inferred` fills them in ({source}). So the static step and the
case study's compute times are inputs as much as results; speedups, spreads and the rows of other
models are predictions.

## Lengths (Fig. 4)

{lengths}

The token shares from 128K up are the published ones; below, published values cannot be told apart
by bin and are chosen so that these statements hold.

## Ablation (Fig. 20): 7B, 2M, Byted, 1,024 GPUs, mean of {steps} steps

{ablation}

More than 25 % from the paper: {far}. What moves it:

* **Ring waits.** We follow Algorithm 2 as printed, which balances loads; a ring still waits for its
  slowest member. Had rings waited for nobody, `loader` would be {no_waits}. `auto` is built not to
  wait.
* **The batch.** A step holds about two sequences of 2M, more or fewer by chance, so its work varies
  by a factor of two (scaling table); the static mesh mostly transfers and hardly notices.
* **The network**: half as fast raises all rows, twice as fast lowers them (table).
* **Offload**: Eq. 3 taken literally makes one 2M sequence many times the step, so sequences are
  kept under 12 % of the step's work per rank, an assumption. Here long rings hide their transfers
  anyway, so fewer hops save nothing; where the paper's 26 % comes from is not published.
* **The loader**: 4M tokens per second and process, assumed.

## Case study (Fig. 18), same setting

{case_study}

The paper's naive step, 272 s, has selective offloading in it or not; it does not say.

## Speedup over the static mesh (Fig. 17), {fig17_steps} step(s) a cell

{speedups}

The paper's labels other than the 2M GitHub ones cannot be placed with certainty. TP x PP assumed:
7B and 13B 2 x 1, 30B 4 x 1, 70B 8 x 4, Mistral 4 x 4; expert-parallel traffic is left out. Cells
are few steps of heavy-tailed lengths, so single ones are noisy. Where `balanced` is over 25 % from
the paper, the same assumptions are open as in the ablation, TP and PP besides; their effect was not
swept.

## Scaling, 7B, 2M, Byted, eight capacities of tokens per rank, `auto`

{scaling}
"""


if __name__ == "__main__":
    main()
