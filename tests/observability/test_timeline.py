# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Real and simulated steps become one form of trace and picture."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_hdp.observability.timeline import draw, load_records, of_simulation, write_chrome
from megatron_hdp.runtime.records import StepRecord
from megatron_hdp.simulation import Job, simulate
from tests.simulation.helpers import COST, cluster, plan_of

TOOL = Path(__file__).parents[2] / "tools" / "trace_picture.py"


@pytest.fixture
def folder(tmp_path):
    """What two ranks with --hdp-trace leave: a ring, then a local micro-batch."""
    slots = [{"ring": [0, 1], "ring_tokens": 500, "local_tokens": 0},
             {"ring": [], "ring_tokens": 0, "local_tokens": 300}]  # fmt: skip
    for rank in range(2):
        record = StepRecord("train", 3, rank, 0, "auto", begin_s=100.0, end_s=104.0)
        record.forwards, record.slots = [(100.0, 101.0), (102.0, 103.0)], slots
        (tmp_path / f"rank0000{rank}.jsonl").write_text(json.dumps(asdict(record)) + "\n")
    return tmp_path


def _simulated():
    plan = plan_of(2, rings=[((0, 1), 0, 1000)], local=[(0, 1, 300), (1, 1, 300)])
    return of_simulation("simulated", plan, simulate(plan, Job(COST), cluster()))


def test_a_real_and_a_simulated_trace_have_one_form(folder, monkeypatch, tmp_path):
    real = tmp_path / "real.json"
    argv = ["trace_picture.py", "--run", f"run={folder}", "--output", str(real)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOL), run_name="__main__")
    write_chrome([_simulated()], str(tmp_path / "simulated.json"))
    traces = [json.loads(p.read_text())["traceEvents"] for p in (real, tmp_path / "simulated.json")]
    forms = [[(e["ph"], e["pid"], e["tid"], e["name"], e.get("cat")) for e in t if e["ph"] == "X"]
             for t in traces]  # fmt: skip
    assert sorted(forms[0]) == sorted(forms[1])
    spans = {e["name"]: (e["ts"], e["dur"]) for e in traces[0] if e["ph"] == "X" and not e["tid"]}
    assert spans == {
        "forward 0": (0, 1e6), "backward 0": (1e6, 1e6),
        "forward 1": (2e6, 1e6), "backward 1": (3e6, 1e6),
    }  # fmt: skip


def test_a_picture_of_both(folder, tmp_path):
    from megatron_hdp.observability.timeline import of_records

    path = tmp_path / "both.png"
    draw([of_records("real", load_records(str(folder))[3]), _simulated()], str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
