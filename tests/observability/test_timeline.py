# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Real and simulated steps become one form of trace and picture."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_hdp.observability.perfetto import write_chrome
from megatron_hdp.observability.picture import draw
from megatron_hdp.observability.timeline import load_records, of_plan, of_records
from megatron_hdp.runtime.records import StepRecord
from megatron_hdp.simulation import Job, simulate
from tests.observability.trace_events import check_trace
from tests.simulation.helpers import COST, cluster, plan_of

TOOL = Path(__file__).parents[2] / "tools" / "trace.py"


@pytest.fixture
def folder(tmp_path):
    """What two ranks with --hdp-trace leave of two steps: a ring, then a local micro-batch."""
    slots = [{"ring": [0, 1], "ring_tokens": 500, "local_tokens": 0},
             {"ring": [], "ring_tokens": 0, "local_tokens": 300}]  # fmt: skip
    for rank in range(2):
        clock = 100.0 + 1000 * rank  # hosts' clocks differ
        lines = []
        for step, begin in ((3, clock), (4, clock + 5)):
            record = StepRecord("train", step, rank, 0, "auto", begin_s=begin, end_s=begin + 4)
            record.forwards, record.slots = [(begin, begin + 1), (begin + 2, begin + 3)], slots
            record.loss_sum, record.loss_tokens = 10.0 * (1 + rank), 5.0
            lines.append(json.dumps(asdict(record)) + "\n")
        (tmp_path / f"rank0000{rank}.jsonl").write_text("".join(lines))
    return tmp_path


def _simulated():
    plan = plan_of(2, rings=[((0, 1), 0, 1000)], local=[(0, 1, 300), (1, 1, 300)])
    return of_plan("simulated", plan, simulate(plan, Job(COST), cluster()))


def test_a_real_and_a_simulated_trace_have_one_form(folder, monkeypatch, tmp_path):
    real = tmp_path / "real.json"
    argv = ["trace.py", "--run", f"run={folder}", "--step", "3", "--output", str(real)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOL), run_name="__main__")
    write_chrome([_simulated()], str(tmp_path / "simulated.json"))
    traces = [check_trace(p) for p in (real, tmp_path / "simulated.json")]
    forms = [[(row, e["name"], e["cat"]) for lines in t.values() for row, line in lines.items()
              for e in line] for t in traces]  # fmt: skip
    assert forms[0] == forms[1]
    spans = {
        e["name"]: (e["ts"], e["dur"]) for lines in traces[0].values() for e in lines["rank 0"]
    }
    assert spans == {
        "forward 0": (0, 1e6), "backward 0": (1e6, 1e6),
        "forward 1": (2e6, 1e6), "backward 1": (3e6, 1e6),
    }  # fmt: skip


def test_a_whole_run_is_merged_into_one_trace(folder, monkeypatch, tmp_path):
    path = tmp_path / "run.json"
    monkeypatch.setattr(sys, "argv", ["trace.py", "--run", f"A={folder}", "--output", str(path)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOL), run_name="__main__")
    lines = check_trace(path)["A"]
    assert list(lines) == ["steps", "rank 0", "rank 1"]
    for row in ("rank 0", "rank 1"):
        begins = [(e["args"]["step"], e["ts"]) for e in lines[row] if e["name"] == "forward 0"]
        assert begins == [(3, 0), (4, 5e6)]
    assert [(e["name"], e["ts"], e["dur"]) for e in lines["steps"]] == [
        ("step 3", 0, 4e6), ("step 4", 5e6, 4e6)]  # fmt: skip
    assert lines["steps"][0]["args"]["loss"] == 3.0


@pytest.mark.parametrize("ending", ["html", "png"])
def test_the_tool_draws_one_step(folder, monkeypatch, tmp_path, ending):
    path = tmp_path / f"step.{ending}"
    argv = ["trace.py", "--run", f"A={folder}", "--run", f"B={folder}", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOL), run_name="__main__")
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        page = path.read_text()
        for words in ("A, step 4, 0.0 MiB over rings: 4.00 s", "1.00 times as fast", "rank 1"):
            assert words in page


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--run", "A={folder}", "--output", "x.gif"], "x.gif: the name must end in"),
        (["--run", "{folder}", "--output", "x.png"], "give TITLE=FOLDER"),
        (["--run", "A={folder}", "--output", "x.png", "--step", "9"], r"the steps \[3, 4\]"),
        (["--run", "A=/nowhere", "--output", "x.png"], "train with --hdp-trace"),
    ],
)
def test_the_tool_refuses_in_one_sentence(folder, monkeypatch, argv, words):
    given = [word.format(folder=folder) for word in argv]
    monkeypatch.setattr(sys, "argv", ["trace.py", *given])
    with pytest.raises(SystemExit, match=words):
        runpy.run_path(str(TOOL), run_name="__main__")


def test_a_picture_of_both(folder, tmp_path):
    path = tmp_path / "both.png"
    draw([of_records("real", load_records(str(folder))[3]), _simulated()], str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
