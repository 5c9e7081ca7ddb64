# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The fused loss on a CPU; test_cross_entropy.py runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from tests.runtime.cross_entropy_cases import RANKS, check, relative_error

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


@pytest.mark.parametrize("ranks", RANKS)
def test_loss_and_gradient_equal_the_definition(ranks):
    check("fused", ranks)


@pytest.mark.parametrize(
    "strides", [(1_200_000_000, 1), (1, 1_200_000_000)], ids="rows columns".split()
)
def test_offsets_past_2_to_the_31(strides):
    """Three rows or columns, the last one at 2.4 G elements; untouched pages are free."""
    from megatron_hdp.runtime.cross_entropy.fused import _row_statistics, _write_gradient
    from megatron_hdp.runtime.cross_entropy.statistics import BackwardRows, LossTerms, Shard

    logits = torch.empty(2_400_000_009, dtype=torch.bfloat16).as_strided((3, 3), strides)
    values = torch.tensor([[1.0, 2.0, 3.0], [0.5, -4.0, 1.0], [2.0, 2.0, 8.0]])
    logits.copy_(values)
    targets, ones = torch.tensor([2, 0, 1]), torch.ones(3)
    found = _row_statistics(logits, targets, Shard(3), LossTerms())
    losses = found.losses(targets, 3, LossTerms())
    leaf = values.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    assert relative_error(losses, wanted.detach(), torch.ones(3)) < 1e-6
    rows = BackwardRows(targets, found.maximum, found.sum_exp, ones)
    _write_gradient(logits, rows, Shard(3), LossTerms())
    wanted.sum().backward()
    assert relative_error(logits, leaf.grad, torch.ones(3)) < 1e-2


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    leaf = torch.randn(4, 9, requires_grad=True)
    return leaf * 1, torch.arange(4)


def test_whoever_saved_the_logits_is_told_that_they_are_gone():
    from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy

    logits, targets = _logits()
    other = (logits**2).sum()
    loss = fused_cross_entropy(logits, targets).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


def test_a_second_backward_is_refused():
    from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy

    logits, targets = _logits()
    loss = fused_cross_entropy(logits, targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_is_refused_and_untouched():
    from megatron_hdp.runtime.cross_entropy.fused import fused_cross_entropy

    leaf = torch.randn(4, 9, requires_grad=True)
    for logits in (leaf, leaf.view(2, 2, 9)):
        with pytest.raises(ValueError, match="leaf"):
            fused_cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))


def test_fp64_pretrain_equals_stock(corpus):
    """The output layer's backward takes the gradient that stands in the logits' buffer."""
    from tests.e2e.harness import gather, pretrain, worst_error
    from tests.e2e.oracle import stock_pretrain

    argv = ["--data-path", corpus, "--train-iters", "2", "--make-vocab-size-divisible-by", "64"]
    more = "--hdp --hdp-cross-entropy fused --tensor-model-parallel-size 2 --hdp-capacity 128"
    wanted = run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]
    got = run_ranks(lambda: pretrain([*argv, *more.split()], keep_grads=1), 4)
    assert got[0].losses == pytest.approx(wanted.losses, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12
