# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Writes docs/reproduction.md from results/paper/*.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import GPUS, RESULTS

from megatron_hdp.simulation import Cluster, ModelShape

PAGE = Path(__file__).with_name("reproduction.md.in")
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
    """Fig. 18: the published numbers, and every strategy."""
    rows = [(r["number"], r["paper"], f"{r['ours']:.3g}", _apart(r["ours"], r["paper"]))
            for r in read("fig18")["rows"]]  # fmt: skip
    return table(("number", "paper", "ours", "apart"), rows)


def strategies() -> str:
    """What the case study's strategies do, mean of the ablation's steps."""
    rows = [
        (name, f"{row['step_s']} s", row["busy_max_over_min"], row["busy_max_over_mean"],
         f"{100 * row['exposed_share_of_busy']:.0f} %", f"{100 * row['ring_wait_share']:.0f} %")
        for name, row in sorted(read("fig20")["case_study"].items(),
                                key=lambda item: -item[1]["step_s"])
    ]  # fmt: skip
    return table(("strategy", "step", "ranks, max / min", "max / mean", "transfers exposed",
                  "ring waits"), rows)  # fmt: skip


def _apart(ours: float, paper: float) -> str:
    """Signed, bold beyond a quarter."""
    share = ours / paper - 1
    text = f"{100 * share:+.0f} %"
    return f"**{text}**" if abs(share) > 0.25 else text


def imbalance() -> str:
    """Fig. 6(b)."""
    found, keys = read("fig06"), ("least", "most", "spread")
    names = ("paper", "attention alone", "with one layer's forward matmuls")
    return table(("1e12 FLOPs", *keys),
                 [(n, *(found[n][k] for k in keys)) for n in names])  # fmt: skip


def timelines() -> str:
    """Fig. 12 and 13."""
    found = read("fig12_13")
    rows = [
        (f"Fig. {key[3:]}", name, f"{row['step_s']} s",
         f"{row['micro_batches'][0]} to {row['micro_batches'][1]}",
         f"{100 * row['idle_share']:.0f} %")
        for key in ("fig12", "fig13") for name, row in found[key].items()
    ]  # fmt: skip
    return table(("figure", "strategy", "step", "micro-batches of a rank", "idle"), rows)


def levers() -> str:
    """Fig. 17's published cells with one assumption changed at a time."""
    found = read("levers")["rows"]
    titles = list(found[0]["speedups"])
    rows = [
        (row["model"], f"{row['mesh'][0]} x {row['mesh'][1]}", row["paper"],
         *(f"{row['speedups'][t]['balance']} / {row['speedups'][t]['auto']}"
           if row["speedups"].get(t) else "" for t in titles))
        for row in found
    ]  # fmt: skip
    return table(("model", "TP x PP", "paper", *titles), rows)


def offload() -> str:
    """Fig. 21."""
    found = read("fig21")
    ours = found["ours"]
    rows = []
    for name, paper in found["paper"].items():
        cells = [f"{variant[name]['time']:.2f}" for variant in ours.values()]
        memory = ours["host link as inferred"][name]["memory_gb"]
        long = found["256K, host link at half speed"][name]["time"]
        rows.append(
            (name, f"{paper['time']:.2f}", *cells, f"{long:.2f}", paper["memory_gb"], memory)
        )
    head = ("ratio", "paper, time", *ours, "256K, half", "paper, GB", "ours, GB")
    return table(head, rows)


def rivals() -> str:
    """Beyond the paper."""
    rows = [
        (r["data"], r["gpus"], r["planner"],
         *((f"{r['step_s']:.1f} s", f"{r['planner_s']:.2f} s{' blocking' if r['blocks'] else ''}",
            f"{r['over_auto']:.2f}") if "error" not in r else ("", "", r["error"])))
        for r in read("rivals")["rows"]
    ]  # fmt: skip
    return table(("data", "GPUs", "planner", "step", "planner, CPU", "over auto"), rows)


def models() -> str:
    """Table 1, and what is assumed besides."""
    rows = []
    for name, gpus in GPUS.items():
        m = ModelShape.load(name)
        experts = f"{m.top_k} of {m.experts}" if m.experts > 1 else ""
        rows.append((name, m.layers, m.heads, m.kv_groups, m.hidden, experts, f"{gpus:,}",
                     m.ffn_hidden, f"{m.tensor_parallel} x {m.pipeline_parallel}"))  # fmt: skip
    head = ("model", "layers", "heads", "KV groups", "hidden", "experts", "GPUs",
            "*feed-forward*", "*TP x PP*")  # fmt: skip
    return table(head, rows)


def speedups() -> str:
    """Fig. 17."""
    rows = [
        (row["model"], row["data"], f"{row['context'] // 1024}K", row["naive"], row["balance"],
         row.get("paper_balance", ""),
         _apart(row["balance"], row["paper_balance"]) if "paper_balance" in row else "",
         row["auto"])
        for row in read("fig17")["rows"]
    ]  # fmt: skip
    head = ("model", "data", "context", "naive", "balanced", "paper, balanced", "apart", "auto")
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
    text = PAGE.read_text().format(
        source=Cluster.load(fig20["cluster"]).source, date=fig20["date"], models=models(),
        lengths=lengths(), imbalance=imbalance(), timelines=timelines(), ablation=ablation(),
        case_study=case_study(), strategies=strategies(), speedups=speedups(), offload=offload(),
        rivals=rivals(), levers=levers(), scaling=scaling(), steps=fig20["steps"],
        fig17_steps=read("fig17")["steps"], rival_steps=read("rivals")["steps"],
        lever_steps=read("levers")["steps"],
        far="; ".join(far) or "none", no_waits=fig20["loader_without_ring_waits"],
    )  # fmt: skip
    DOCS.write_text(text)


if __name__ == "__main__":
    main()
