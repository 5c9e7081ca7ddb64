# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Each handled fault is there before and gone after; torch_adam: test_stock_training."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import sys
from megatron_hdp.cpu import faults, stand_ins

def symptoms():
    import contextlib, io
    from megatron.core.datasets import utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    def seen(act):
        try:
            act()
        except (SystemExit, AssertionError, ValueError) as error:
            return type(error).__name__
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2,
        tensor_model_parallel_size=2, sequence_parallel=True, persist_layer_norm=False)
    return {
        "compile_helpers": seen(lambda: utils.compile_helpers()),
        "report_stats": seen(lambda: RerunMode("report_stats")),
        "nonsense": seen(lambda: RerunMode("nonsense")),
        "norm": seen(lambda: WrappedTorchNorm(config=config, hidden_size=8)),
        "queue": filesystem_async._results_queue is None,
        "says disk full": failed_save(filesystem_async.FileSystemWriterAsync),
    }

def failed_save(writer):
    import queue, torch, types
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    from torch.distributed.checkpoint.planner import WriteItemType
    results = queue.Queue()
    item = types.SimpleNamespace(type=WriteItemType.TENSOR, index=0)
    bucket = ("/dev/full", "", ([], [(item, torch.zeros(1 << 20))]))
    transforms = [_StorageWriterTransforms()]
    writer.write_preloaded_data_multithread(transforms, False, 3, [bucket], results)
    return "No space left on device" in str(results.get())

stand_ins.install()
before = symptoms()
by_module = {fault.symbol.split(":")[0].rsplit(".", 1)[1] for fault in faults.handle_needed()}
"""

FOUND = """
assert before == {"compile_helpers": "SystemExit", "report_stats": "ValueError",
                  "nonsense": "ValueError", "norm": "AssertionError", "queue": True,
                  "says disk full": False}, before
"""

GONE = """
assert symptoms() == {"compile_helpers": None, "report_stats": None, "nonsense": "ValueError",
                      "norm": None, "queue": True, "says disk full": True}, symptoms()
assert by_module == {"utils", "distrib_optimizer", "torch_norm", "rerun_state_machine",
                     "filesystem_async"}, by_module
assert len(faults.handle_needed()) == 7
faults.handle_needed(cpu_mode=True)
assert not symptoms()["queue"]
"""

WITHOUT_TRITON = """
sys.modules["triton"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
"""


def _run(code: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_faults_are_there_and_then_gone():
    _run(PRELUDE + FOUND + GONE)


@pytest.mark.slow
def test_megatron_imports_without_triton():
    _run(
        "import sys\n"
        + WITHOUT_TRITON
        + """
try:
    import megatron.core
except ImportError as error:
    print(error)
else:
    raise AssertionError("Megatron does not need triton any more")
"""
    )
    _run(
        "import sys\n"
        + WITHOUT_TRITON
        + """
from megatron_hdp import cpu
cpu.install()
import megatron.training
from megatron.core.transformer.moe.ops import paged_stash
try:
    paged_stash.paged_stash_copy_kernel()
except RuntimeError as error:
    assert "needs triton" in str(error)
"""
    )
