# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The loader's benchmark of serving, with three clients: its figures are of what was served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "loader.py"


@pytest.mark.slow
def test_serving_is_rehearsed_by_three_clients():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--part", "serving"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    local, row = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert local["tokens"] > 1000
    assert row["clients"] == 3
    assert len(row["server_mib"]) == 2
    for name in ("tokens_per_s_per_server_core", "tokens_per_s", "scheduler_mib"):
        assert row[name] > 0
    assert row["client_adds_mib"]["worst"] < 100, "a client holds some steps of its own tokens"
    assert max(row["server_mib"]) < 1000, "a server keeps nothing"
    assert row["served_tokens"] >= 3 * row["tokens_per_step"]
