# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which loss `auto` takes, the memory that it goes by, and the GPU benchmark's rehearsal."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_hdp.planning.device_memory import DeviceMemory
from megatron_hdp.planning.loss_memory import MODES, LossMemory
from tests.e2e.harness import ROOT


def _args(*more: str) -> argparse.Namespace:
    """Megatron's arguments of a 7B-like launch line, with what its validation would derive."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_hdp.runtime.options import add_hdp_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_hdp_arguments(add_megatron_arguments(parser))
    line = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
    line += "--seq-length 262144 --tensor-model-parallel-size 8 --sequence-parallel "
    line += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    args = parser.parse_args([*line.split(), "--use-distributed-optimizer", *more])
    args.kv_channels, args.padded_vocab_size, args.data_parallel_size = 128, 131_072, 8
    args.params_dtype, args.expert_tensor_parallel_size, args.world_size = torch.bfloat16, 8, 64
    args.exp_avg_dtype = args.exp_avg_sq_dtype = torch.float32
    return args


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ("", "megatron"),
        ("--hdp-device-memory 80", "megatron"),
        ("--hdp-device-memory 40", "chunked"),
        ("--hdp-device-memory 40 --hdp-capacity 32768", "megatron"),
        ("--hdp-device-memory 40 --use-mup", "megatron"),
        ("--hdp-device-memory 80 --hdp-z-loss 1e-4", "chunked"),
        ("--hdp-device-memory 40 --hdp-cross-entropy fused", "fused"),
    ],
)
def test_auto_is_megatrons_own_unless_it_does_not_fit(megatron_on_cpu, more, mode):
    from megatron_hdp.runtime.cross_entropy.choice import choose_loss
    from megatron_hdp.runtime.options import HdpOptions

    args = _args(*more.split())
    assert choose_loss(HdpOptions.from_args(args), args).mode == mode


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("recomputed", [0, 7000])
def test_largest_capacity_is_the_last_that_fits(depth, recomputed):
    loss = LossMemory(50_304, 1024, tensor_parallel=2, sums_in_main_grad=False)
    memory = DeviceMemory(2e9, 3000.0, loss, 4e8, recomputed, depth)
    for mode in MODES:
        most = memory.largest_capacity(mode)
        assert most > 0
        assert memory.fits(mode, most)
        assert not memory.fits(mode, most + 1)


def test_states_are_counted_by_dtype_and_sharding(megatron_on_cpu):
    """bf16 with a distributed optimizer over DP x CP is Megatron's own 6 + 12 / ranks."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    from megatron_hdp.runtime.device_memory import state_bytes

    args = _args()
    assert state_bytes(args) == pytest.approx(compute_weight_and_optimizer_memory(args))
    args.params_dtype = torch.float32
    assert state_bytes(args) == pytest.approx(
        compute_weight_and_optimizer_memory(args) * (8 + 8 / 8) / (6 + 12 / 8)
    )


def test_bytes_are_those_of_the_paper():
    """ByteScale: fp32 logits of 256K tokens and a 128K vocabulary take 16 GB at TP 8."""
    memory = LossMemory(131_072, 4096, tensor_parallel=8)
    tokens, copy = 262_144, 16 * 2**30
    assert memory.peak("megatron", tokens) == 1.5 * copy
    assert memory.peak("fused", tokens) == 0.5 * copy
    assert memory.peak("chunked", tokens) == 1024 * 16_384 * 6
    beside = LossMemory(131_072, 4096, tensor_parallel=8, sums_in_main_grad=False)
    assert beside.peak("chunked", 1) - memory.peak("chunked", 1) == 4 * 16_384 * 4096


def test_refusals_name_flag_value_and_way_out(megatron_on_cpu):
    from megatron_hdp.runtime.cross_entropy.support import loss_refusals

    for more, words in {
        ("--hdp-cross-entropy-chunk", "0"): ("--hdp-cross-entropy-chunk 0", "at least one"),
        ("--hdp-label-smoothing", "1.0"): ("--hdp-label-smoothing 1.0", "less than 1"),
        ("--hdp-z-loss", "nan"): ("--hdp-z-loss nan", "0 or more"),
        ("--hdp-z-loss", "1e-4", "--hdp-cross-entropy", "megatron"): ("--hdp-z-loss", "chunked"),
    }.items():
        (sentence,) = loss_refusals(_args(*more))
        assert all(word in sentence for word in words), sentence
    assert not loss_refusals(_args("--hdp-z-loss", "1e-4"))


@pytest.mark.slow
def test_gpu_benchmark_rehearses_on_a_cpu():
    done = subprocess.run(
        [sys.executable, "scripts/benchmarks/gpu_cross_entropy.py", "--device", "cpu"],
        cwd=ROOT, env=dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 4
    for row in rows[:2]:
        assert {"megatron_ms", "megatron_fused_ms", "torch_compile_ms", "fused_ms"} <= row.keys()
    for row in rows[2:]:
        assert {"megatron_ms", "chunked_ms"} <= row.keys()
