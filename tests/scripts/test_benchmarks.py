# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark scripts that could be wrong without anyone noticing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.simulation import Job, simulate
from megatron_hdp.simulation.batches import draw_steps
from tests.simulation.helpers import COST, cluster, plan_of

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    def load(name: str):
        for folder in (BENCHMARKS, BENCHMARKS / "paper"):
            monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(name)

    yield load
    for name in (
        "planner_tables", "simulator_check", "rivals", "common", "pictures", "ring_timeline"
    ):  # fmt: skip
        sys.modules.pop(name, None)


def test_order_of_events_counts_pairs_across_ranks(script):
    check = script("simulator_check")
    plan = plan_of(2, local=[(0, 0, 1000), (0, 1, 1000), (1, 0, 3000)])
    found = simulate(plan, Job(COST), cluster())
    starts = found.forward[0][0]
    same = [{"forwards": [(t, t + 1) for t in row[~np.isnan(row)]]} for row in starts]
    # rank 0's second forward against rank 1's first; those that start together are no pair
    assert check.order(found, same) == (1, 1)
    late = [same[0], {"forwards": [(99.0, 100.0)]}]
    assert check.order(found, late) == (0, 1)


def test_a_slower_machine_takes_longer_for_everything(script):
    check = script("simulator_check")
    profiled = check.Profiled(COST, 1.0, 0.1, 0.0, reference_s=0.01)
    slower = profiled.at_speed(0.015)
    plan = plan_of(2, [((0, 1), 0, 2000)], [(0, 1, 500)])
    found, wanted = (
        simulate(plan, Job(p.cost), cluster(p.cost)).step_s for p in (slower, profiled)
    )
    assert found == pytest.approx(1.5 * wanted)
    assert slower.sync_s == 1.5


def test_rivals_run_the_same_tokens(script, megatron_on_cpu):
    rivals = script("rivals")
    place = rivals.setting("llama-7b", 2**16, 32)
    request = draw_steps("github", 2**16, 8, 1, 3)[0]
    packed = rivals.by_length(request, 2**16)
    assert sorted(packed.ids.tolist()) == sorted(request.ids.tolist())
    held = np.add.reduceat(packed.lengths, packed.packs[:-1])
    assert held.max() <= 2**16
    assert held.sum() == request.lengths.sum()
    plan = rivals.longest_first(place.planner("naive", request), request)
    assert plan.num_tokens == request.lengths.sum()
    seconds, spent = rivals.megatron(place, request)
    work = float(place.cost.local_s(request.lengths).sum()) / place.num_ranks
    assert seconds > work
    assert spent > 0


def test_tables_of_the_planner_are_those_of_its_result(script):
    tables = script("planner_tables")
    page = tables.PAGE.read_text()
    assert page == tables.page(page), "run python scripts/benchmarks/planner_tables.py"
    row = next(line for line in page.splitlines() if line.startswith("| 1 | 8K | 8 |"))
    assert tables.page(page.replace(row, row.replace("1.0", "0.9"))) == page


def test_a_transfer_is_counted_where_its_receiver_was(script):
    from megatron_hdp.testing.ring_timeline import (
        Exchange,
        Hop,
        Reception,
        Span,
        Timeline,
        receptions,
        shares,
    )

    hop = Hop("forward", "kv", 1)

    def timeline(peer, posting, arrived, waits, blocks):
        exchange = Exchange(hop, peer, peer, Span(*posting), arrived, [Span(*at) for at in waits])
        return Timeline({"forward": [Span(*at) for at in blocks]}, {hop: exchange})

    # Rank 1 comes four seconds late; what rank 0 sends is there at once, the other way takes five.
    first = timeline(1, (0, 1), 10, [(3, 5), (7, 10)], [(1, 3)])
    late = timeline(0, (4, 6), 6, [], [(6, 9)])
    found = receptions([first, late])
    assert found[0] == Reception(0, hop, Span(4, 10), 0.0, 0.0, 4.0, 5.0, 1.0)
    assert found[1] == Reception(1, hop, Span(4, 6), 0.0, 2.0, 0.0, 0.0, 0.0)
    assert shares(found) == {"in_blocks": 0.0, "in_posting": 0.25, "in_waits": 0.5}


def test_ring_timeline_tells_a_ring_that_overlaps_from_one_that_waits(script, tmp_path):
    timeline = script("ring_timeline")
    (case,) = timeline.QUICK
    rounds = timeline.run(case)
    overlapped, blocking = timeline.rows(case, rounds)
    assert overlapped["transfer_shares"]["in_blocks"]["high"] > 0
    assert blocking["transfer_shares"]["in_blocks"]["high"] == 0
    hops = [(row["phase"], row["channel"], row["hop"]) for row in overlapped["hops"]]
    assert hops == [("forward", "kv", 1), ("backward", "kv", 1), ("backward", "dkv", 1)]
    timeline.draw(timeline.typical(rounds), case, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
