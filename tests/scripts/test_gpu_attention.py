# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark of attention, rehearsed on a CPU: it runs, and it would notice a wrong ring."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from megatron_hdp.runtime.attention.cpu_flash import CpuFlash

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "gpu_attention.py"
RINGS = [1, 2, 4, 8, 16]


class OffByALittle(CpuFlash):
    """Its LSE is wrong in the blocks that rings alone compute."""

    def forward(self, q, k, v, arguments, causal, scale):
        out, lse = super().forward(q, k, v, arguments, causal, scale)
        return out, lse if causal else lse + 0.1


def test_rehearsal_needs_torch_alone():
    code = (
        "import runpy, sys; sys.argv = ['x', '--device', 'cpu']; sys.modules['megatron'] = None\n"
        "try: runpy.run_path({!r}, run_name='__main__')\n"
        "finally: print([m for m in ('rich', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(str(SCRIPT))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, packages = done.stdout.splitlines()
    assert packages == "[]"
    rows = [json.loads(line) for line in lines]
    assert [row["ring"] for row in rows if "error" in row] == 4 * RINGS
    assert [row["sequences"] for row in rows if "overhead" in row] == [1, 3]
    timed = [row for row in rows if "fraction_of_ideal" in row]
    assert [(row["s"], row["packed"]) for row in timed[:: len(RINGS)]] == [
        (256, False), (256, True), (512, False), (512, True)
    ]  # fmt: skip
    assert [row["ring"] for row in timed] == 4 * RINGS


def test_a_ring_that_is_slightly_wrong_is_noticed():
    script = runpy.run_path(str(SCRIPT))
    device = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        sizes = script["SIZES"]["cpu"]._replace(dtype=dtype, rings=(1, 2, 8))
        assert all(row["right"] for row in script["check"](sizes, CpuFlash(), device))
        rows = script["check"](sizes, OffByALittle(), device)
        assert [row["right"] for row in rows] == 4 * [True, False, False], (dtype, rows)


def test_what_takes_too_long_is_left_out_and_named():
    script = runpy.run_path(str(SCRIPT))
    sizes = script["SIZES"]["cpu"]._replace(rings=(1,), repeats={256: 1, 512: 1})
    device = torch.device("cpu")
    rows = list(script["rings"](sizes, CpuFlash(), device, lambda: 0.0))
    assert [(row["s"], "left_out" in row) for row in rows] == 2 * [(256, False)] + 2 * [(512, True)]
