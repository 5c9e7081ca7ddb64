# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Do a ring's transfers hide behind its compute? Real processes over gloo, on one machine.

Every rank writes down when each block was computed, when each transfer was posted and complete, and
how long the ring waited for it (`megatron_hdp.testing.ring_timeline`). Rounds of the ring as it is
and of one that waits for each transfer where it is posted take turns. Two minutes on two cores; run
it on a machine that does nothing else.

    python scripts/benchmarks/ring_timeline.py           # writes results/ring-timeline-cpu.json and
                                                         # docs/figures/ring-overlap.png
    python scripts/benchmarks/ring_timeline.py --quick   # small and few; prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import MicroBatch, Ring
from megatron_hdp.planning.values import Sequence as SequenceOf
from megatron_hdp.runtime.attention.ring import ring_backward, ring_forward
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.runtime.waiting import waiting
from megatron_hdp.testing.ring_timeline import (
    Reception,
    Span,
    TimedCommunicators,
    TimedCpuFlash,
    Timeline,
    receptions,
    shares,
)

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "scripts" / "benchmarks" / "results" / "ring-timeline-cpu.json"
PICTURE = ROOT / "docs" / "figures" / "ring-overlap.png"
_PEER_TIMEOUT_S = 60
_RUN_TIMEOUT_S = 280.0


class Case(NamedTuple):
    """A ring with one sequence."""

    ranks: int
    tokens: int
    heads: tuple[int, int, int]
    """Query heads, K/V heads, head dimension."""
    rounds: int


CASES = (Case(2, 4096, (8, 8, 64), 12), Case(4, 8192, (8, 8, 64), 12))
QUICK = (Case(2, 1024, (4, 4, 64), 3),)

Round = dict[str, list[Timeline]]
"""The timelines of all ranks, by "overlapped" and "blocking"."""


def run(case: Case) -> list[Round]:
    """Every round of a case, in both ways."""
    by_rank = run_ranks(partial(_rank, case), case.ranks, timeout_s=_RUN_TIMEOUT_S)
    return [
        {way: [rank[number][way] for rank in by_rank] for way in ("overlapped", "blocking")}
        for number in range(case.rounds)
    ]


def _rank(case: Case) -> list[dict[str, Timeline]]:
    dist.init_process_group("gloo")
    communicators = TimedCommunicators.create(
        [range(case.ranks)], timeout=timedelta(seconds=_PEER_TIMEOUT_S)
    )
    assert isinstance(communicators, TimedCommunicators)
    micro_batch = MicroBatch(0, Ring(tuple(range(case.ranks))), (SequenceOf(0, case.tokens),), ())
    layout = MicroBatchLayout.build(micro_batch, dist.get_rank())
    state = MicroBatchState.build(
        layout, step=0, slot=0, communicators=communicators, device=torch.device("cpu")
    )
    query_heads, groups, dim = case.heads
    inputs = [
        torch.randn(layout.num_tokens, heads, dim)
        for heads in (query_heads, groups, groups, query_heads)
    ]
    _pass(inputs, state, communicators)  # warms memory and connections
    rounds = []
    for _ in range(case.rounds):
        found = {}
        for way in ("overlapped", "blocking"):
            communicators.blocking = way == "blocking"
            _meet()
            found[way] = _pass(inputs, state, communicators)
        rounds.append(found)
    _meet()
    return rounds


def _meet() -> None:
    with waiting("the other ranks between two rounds"):
        dist.barrier()


def _pass(
    inputs: Sequence[torch.Tensor], state: MicroBatchState, communicators: TimedCommunicators
) -> Timeline:
    """A forward and a backward pass of one layer."""
    timeline = communicators.timeline = Timeline()
    kernel = TimedCpuFlash(timeline)
    q, k, v, grad_out = inputs
    scale = q.shape[-1] ** -0.5
    begin = monotonic()
    out, lse = ring_forward(q, k, v, state, kernel, scale, 1)
    ring_backward(grad_out, q, k, v, out, lse, state, kernel, scale, 1)
    timeline.whole = Span(begin, monotonic())
    return timeline


def rows(case: Case, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """What a case comes to, both ways."""
    return [_row(case, way, [one[way] for one in rounds]) for way in rounds[0]]


def _row(case: Case, way: str, rounds: Sequence[Sequence[Timeline]]) -> dict[str, Any]:
    found = [receptions(timelines) for timelines in rounds]
    whole = [[one.whole.end - one.whole.begin for one in timelines] for timelines in rounds]
    exposed = [
        sum(one.waited for one in hops) / sum(times)
        for hops, times in zip(found, whole, strict=True)
    ]
    late = [sum(one.late for one in hops) / sum(o.waited for o in hops) for hops in found]
    names = list(dict.fromkeys(one.hop for one in found[0]))
    by_hop = {
        name: [one for one in chain.from_iterable(found) if one.hop == name] for name in names
    }
    return {
        "ranks": case.ranks,
        "way": way,
        "tokens": case.tokens,
        "heads": case.heads[0],
        "groups": case.heads[1],
        "head_dim": case.heads[2],
        "rounds": case.rounds,
        "round_s": _spread([max(times) for times in whole]),
        "transfer_shares": _each([shares(hops) for hops in found]),
        "waits_share_of_time": _spread(exposed),
        "share_of_waits_for_late_neighbours": _spread(late),
        "hops": [_hop(*name, hops) for name, hops in by_hop.items()],
    }


def _hop(phase: str, channel: str, number: int, found: Sequence[Reception]) -> dict[str, Any]:
    """A hop over all rounds and ranks."""
    return {
        "phase": phase,
        "channel": channel,
        "hop": number,
        "transfer_ms": _spread([1e3 * (one.transfer.end - one.transfer.begin) for one in found]),
        "transfer_shares": {name: round(share, 4) for name, share in shares(found).items()},
        "wait_ms": _spread([1e3 * one.waited for one in found]),
        "wait_for_late_neighbour_ms": _spread([1e3 * one.late for one in found]),
    }


def _each(found: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: _spread([one[name] for one in found]) for name in found[0]}


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}


def show(found: Sequence[dict[str, Any]]) -> None:
    """The rows as tables."""
    console = Console(width=110)
    for row in found:
        table = Table(
            "hop", "transfer ms", "in blocks", "posting", "waits", "wait ms", "for a neighbour, ms",
            title=f"{row['ranks']} ranks, {row['way']}; {_text(row['waits_share_of_time'])} of "
            f"time in waits; {_text(row['round_s'])} s a round",
        )  # fmt: skip
        for hop in row["hops"]:
            table.add_row(
                f"{hop['phase']} {hop['channel']} {hop['hop']}", _text(hop["transfer_ms"]),
                *(f"{share:.3f}" for share in hop["transfer_shares"].values()),
                _text(hop["wait_ms"]), _text(hop["wait_for_late_neighbour_ms"]),
            )  # fmt: skip
        together = (_text(share) for share in row["transfer_shares"].values())
        table.add_row("all", "", *together)
        console.print(table)


def _text(spread: dict[str, float]) -> str:
    return "{median:.3g} ({low:.3g}-{high:.3g})".format(**spread)


def draw(timelines: Sequence[Timeline], case: Case, path: Path) -> None:
    """One round: for each rank its blocks, the transfers to it below them, and its waits."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = {"forward": (0.0, "#3b75af"), "backward": (0.0, "#1f4e79")}
    ways = {"kv": (0.32, "#e0a030"), "dkv": (0.52, "#2a9d5c")}
    start = min(one.whole.begin for one in timelines)
    figure = Figure(figsize=(9, 0.9 + 0.75 * case.ranks), layout="constrained")
    axis = figure.subplots()

    def bars(spans: Sequence[Span], at: float, height: float, colour: str) -> None:
        milliseconds = [(1e3 * (one.begin - start), 1e3 * (one.end - one.begin)) for one in spans]
        axis.broken_barh(milliseconds, (at, height), facecolors=colour)

    for rank, timeline in enumerate(timelines):
        for phase, (offset, colour) in lanes.items():
            bars(timeline.blocks[phase], rank + offset, 0.28, colour)
        postings = [exchange.posting for exchange in timeline.exchanges.values()]
        bars(postings, rank, 0.28, "#9467bd")
        waits = chain.from_iterable(one.waits for one in timeline.exchanges.values())
        bars(list(waits), rank, 0.28, "#c03030")
    for one in receptions(timelines):
        offset, colour = ways[one.hop.channel]
        bars([one.transfer], one.rank + offset, 0.16, colour)
    axis.set_yticks([rank + 0.34 for rank in range(case.ranks)], map(str, range(case.ranks)))
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds", ylabel="rank")
    axis.spines[["top", "right"]].set_visible(False)
    shown = {
        "block, forward": lanes["forward"][1], "block, backward": lanes["backward"][1],
        "K/V on its way here": ways["kv"][1], "dK/dV on its way here": ways["dkv"][1],
        "posting": "#9467bd", "waiting": "#c03030",
    }  # fmt: skip
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in shown.items()],
        loc="outside upper center", ncols=len(shown), frameon=False, fontsize=8,
    )  # fmt: skip
    figure.savefig(path, dpi=90)


def typical(rounds: Sequence[Round]) -> list[Timeline]:
    """The overlapped round of median duration."""
    overlapped = [one["overlapped"] for one in rounds]
    overlapped.sort(key=lambda all_: max(one.whole.end - one.whole.begin for one in all_))
    return overlapped[len(overlapped) // 2]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and few; writes nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for case in QUICK if args.quick else CASES:
        rounds = run(case)
        found += rows(case, rounds)
        if not args.quick:
            draw(typical(rounds), case, PICTURE)
    show(found)
    if args.quick:
        return
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "about": "median and quartiles over rounds, of hops over rounds and ranks",
    }
    RESULT.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
