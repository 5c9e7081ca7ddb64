# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark of offload, rehearsed on a CPU: it runs, and its figures mean what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "gpu_offload.py"
LENGTHS, LAYERS = (64, 128), 4


def test_rehearsal_on_a_cpu():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for variant in ("no offload", "r=0.5", "r=0.8", "r=1", "full recompute"):
        assert done.stdout.count(f" {variant} ") == len(LENGTHS)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["skipped"] == []
    assert set(found["bandwidth"]) == {"out_bytes_s", "back_bytes_s", "both_bytes_s"}


def test_figures():
    import runpy

    script = runpy.run_path(str(SCRIPT))
    rows = [
        {"length": 8, "variant": "no offload", "seconds": 1.0, "peak_bytes": 1000},
        {"length": 8, "variant": "r=1", "seconds": 1.01, "peak_bytes": 800, "saved_bytes": 400},
        {"length": 4, "variant": "no offload", "seconds": 1.0, "peak_bytes": 1000},
        {"length": 4, "variant": "r=1", "seconds": 1.2, "peak_bytes": 800, "saved_bytes": 400},
        {"length": 16, "variant": "r=1", "out_of_memory": True},
    ]
    summary = script["summarise"](rows, {"both_bytes_s": 700.0}, LAYERS)
    assert [row["length"] for row in summary] == [8, 4]
    assert summary[0]["overhead"] == pytest.approx(0.01)
    assert summary[0]["saved_over_expected"] == pytest.approx(1.0)  # (4 - 2) x 100 bytes
    assert summary[0]["predicted_hidden_ratio"] == pytest.approx(0.5)  # 1 / 4 / 3.5 x 700 / 100
    assert script["crossover"](summary) == {"measured": 8, "predicted": None}
