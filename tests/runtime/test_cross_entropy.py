# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The chunked loss against the definition; the fused one in a process where Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import ROOT
from tests.runtime.cross_entropy_cases import RANKS, check, relative_error

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


@pytest.mark.parametrize("ranks", RANKS)
def test_chunked_loss_and_gradient_equal_the_definition(ranks):
    check("chunked", ranks)


@pytest.mark.slow
def test_fused_loss_in_tritons_interpreter():
    """Triton interprets for the life of a process or never: these checks have their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/runtime/interpreted_cross_entropy.py"],
        cwd=ROOT, env=dict(os.environ, TRITON_INTERPRET="1"),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout.splitlines()[-1]), "something was skipped"


@pytest.mark.slow
def test_kernels_compile_for_sm_90(monkeypatch, tmp_path):
    """To machine code, with 16-byte loads where Megatron's padding of the vocabulary allows."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_hdp.runtime.cross_entropy import triton_kernels as kernels

    constants = {
        kernels.statistics_kernel: {"column_stride": 1, "TOTAL": True},
        kernels.gradient_kernel: {
            "column_stride": 1, "IGNORE_INDEX": -100, "SMOOTHING": 0.1, "VOCABULARY": 131072,
            "Z_LOSS": 1e-4,
        },
    }  # fmt: skip
    types = {"logits": "*bf16", "targets": "*i64", "columns": "i32", "row_stride": "i64",
             "first": "i32"}  # fmt: skip
    for kernel, constant in constants.items():
        constant |= {"ACCUMULATE": tl.float32, "BLOCK": 4096}
        signature = {
            name: "constexpr" if name in constant else types.get(name, "*fp32")
            for name in kernel.arg_names
        }
        aligned = {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in ("logits", "columns", "row_stride")
        }
        source = ASTSource(kernel, signature, constexprs=constant, attrs=aligned)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}
        )
        assert compiled.asm["cubin"]
        assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_chunked_equals_megatrons_own(label_smoothing):
    """Label smoothing too, where Megatron's has one rank (over several its ranks disagree)."""

    def run():
        import torch.distributed as dist
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        from megatron_hdp.runtime.cross_entropy.chunked import linear_cross_entropy
        from megatron_hdp.runtime.cross_entropy.statistics import LossTerms
        from megatron_hdp.testing import fp64

        fp64.install()
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        hidden, weight = torch.randn(2, 24, 16, dtype=torch.float64)
        targets, weighs = torch.randint(0, 24, (24,)), torch.rand(24, dtype=torch.float64)
        results = []
        for compute in (
            lambda h, w: linear_cross_entropy(
                h, w, targets, terms=LossTerms(label_smoothing=label_smoothing)
            ),
            lambda h, w: vocab_parallel_cross_entropy(
                h @ w.t(), targets, label_smoothing, dist.group.WORLD
            ),
        ):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            losses = compute(*leaves)
            losses.backward(weighs)
            results.append([losses.detach(), *(leaf.grad for leaf in leaves)])
        return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]

    # Megatron rounds its smoothing to fp32.
    tolerance = 1e-8 if label_smoothing else 1e-12
    assert max(run_ranks(run, 1, timeout_s=60)[0]) < tolerance


def test_chunked_takes_minus_infinity_and_rows_of_nan():
    """Logits are an outer product: entries of -inf, one rank's shard full of them; a masked NaN.

    A -inf in the weight, or NaN in a hidden state, makes that operand's gradient NaN by the rule
    of products, in Megatron too; losses, and the weight's gradient beside -inf, are defined.
    """

    def run() -> tuple[float, float]:
        import torch.distributed as dist

        from megatron_hdp.runtime.cross_entropy.chunked import Projection, linear_cross_entropy

        dist.init_process_group("gloo")
        weight = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
        weight[[5, *range(30, 40)]] = -torch.inf
        hidden = torch.tensor([[0.5], [1.0], [3.0], [2.0]], dtype=torch.float64)
        targets = torch.tensor([3, 0, 29, 11])
        whole = weight.clone().requires_grad_()
        wanted = torch.nn.functional.cross_entropy(hidden @ whole.t(), targets, reduction="none")
        wanted.sum().backward()
        shard = weight.chunk(4)[dist.get_rank()].clone().requires_grad_()
        projection = Projection(dist.group.WORLD, chunk=2)
        losses = linear_cross_entropy(hidden, shard, targets, projection)
        losses.sum().backward()
        error = relative_error(shard.grad, whole.grad.chunk(4)[dist.get_rank()], torch.ones(1))
        hidden[1], targets[1] = torch.nan, -100
        masked = linear_cross_entropy(hidden, shard, targets, projection)
        wanted = torch.where(targets < 0, 0.0, wanted)
        return error, relative_error(masked.detach(), wanted.detach(), torch.ones(1))

    assert max(max(pair) for pair in run_ranks(run, 4, timeout_s=60)) < 1e-12
