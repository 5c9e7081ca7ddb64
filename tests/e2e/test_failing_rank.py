# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A rank that fails ends at once under torchrun, whatever its threads still wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.e2e.harness import BASE, ROOT


@pytest.mark.slow
def test_torchrun_sees_a_failed_rank_at_once(corpus, tmp_path):
    """The default timeout is ten minutes; nothing may wait for it."""
    script = tmp_path / "failing.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import megatron_hdp\n"
        "megatron_hdp.enable()\n"
        "from megatron_hdp.runtime import executor\n"
        "run = executor._StepRun.run\n"
        "def fail(self, *args):\n"
        "    if os.environ['RANK'] == '1' and self.step.step == 2:\n"
        "        raise SystemExit('planted failure')\n"
        "    return run(self, *args)\n"
        "executor._StepRun.run = fail\n"
        "import runpy\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'pretrain_gpt.py')!r}, run_name='__main__')\n"
    )
    begun = time.monotonic()
    # `timeout` ends torchrun with SIGTERM, upon which torchrun ends its ranks.
    done = subprocess.run(
        ["timeout", "200", sys.executable, "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", "2", str(script), *BASE, "--data-path", corpus,
         "--train-iters", "5", "--hdp", "--hdp-cpu", "--hdp-capacity", "128"],
        cwd=ROOT, env=dict(os.environ, PYTHONWARNINGS="ignore"), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "planted failure" in done.stderr + done.stdout
    assert time.monotonic() - begun < 120
