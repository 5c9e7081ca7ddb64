# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""CPU mode comes on request only, before Megatron, and never where a GPU is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_hdp.cpu.launch import run_ranks


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_importing_changes_nothing():
    code = """
import torch
before = (torch.cuda.is_available, torch.zeros, torch.Tensor.to, torch.compile)
import megatron_hdp, megatron_hdp.cpu, megatron_hdp.cpu.launch, megatron_hdp.cpu.stand_ins
assert before == (torch.cuda.is_available, torch.zeros, torch.Tensor.to, torch.compile)
assert not megatron_hdp.cpu.is_installed()
import sys
assert not [name for name in sys.modules if name.startswith("megatron.")]
"""
    ran = _run(code)
    assert ran.returncode == 0, ran.stderr


def test_after_megatron_is_refused():
    code = """
import megatron.core.enums
from megatron_hdp import cpu
try:
    cpu.install()
except RuntimeError as error:
    print(error)
import torch
print(cpu.is_installed(), torch.cuda.is_available())
"""
    sentence, state = _run(code).stdout.strip().splitlines()
    assert sentence.startswith("--hdp-cpu comes too late, megatron.core")
    assert "before the first Megatron import" in sentence
    assert state == "False False"


def test_with_a_gpu_is_refused():
    code = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda *a: "NVIDIA H100"
zeros = torch.zeros
from megatron_hdp import cpu
try:
    cpu.install()
except RuntimeError as error:
    print(error)
assert torch.zeros is zeros and not cpu.is_installed()
"""
    sentence = _run(code).stdout.strip()
    assert sentence.startswith("--hdp-cpu is for machines without a GPU, and this one has NVIDIA")
    assert "CUDA_VISIBLE_DEVICES=''" in sentence


@pytest.mark.usefixtures("megatron_on_cpu")
def test_installing_again_does_nothing():
    def again() -> bool:
        import torch

        from megatron_hdp import cpu
        from megatron_hdp.cpu import faults

        before = torch.zeros, torch.Tensor.type, faults.handle_needed(cpu_mode=True)
        cpu.install()
        return before == (torch.zeros, torch.Tensor.type, faults.handle_needed(cpu_mode=True))

    assert run_ranks(again, 1) == [True]
