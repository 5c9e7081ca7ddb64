# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Plans that no planner would make, through the real schedule."""

from __future__ import annotations

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import Recorded, gather, plan_with, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain
from tests.random_plans import RandomPlanner

MODEL = [
    "--num-layers", "4", "--train-iters", "16", "--global-batch-size", "6",
    "--make-vocab-size-divisible-by", "64",
]  # fmt: skip


@pytest.fixture(scope="module")
def stock(corpus) -> Recorded:
    argv = ["--data-path", corpus, *MODEL]
    return run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]


def _train(argv: list[str], seed: int, degree: int) -> Recorded:
    plan_with(lambda request, num_ranks: RandomPlanner(request, num_ranks, seed, degree))
    return pretrain(argv, keep_grads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "seed"),
    [
        ("", 6, 6),
        ("--pipeline-model-parallel-size 2", 6, 6),
        ("--pipeline-model-parallel-size 4", 8, 11),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4, 4),
    ],
    ids=["HDP6", "PP2 x HDP3", "PP4 x HDP2", "TP2 x HDP2"],
)
def test_random_plans_equal_stock(corpus, stock, layout, ranks, seed):
    """16 plans that no planner would make; each step's gradients enter the parameters at the end.

    Training and evaluation; loss masks are all zero on some ranks' whole step.
    """
    argv = ["--data-path", corpus, *MODEL, "--hdp", *layout.split()]
    degree = 1 if "tensor" in layout else 2  # of two K/V heads, TP leaves one to a rank
    got = run_ranks(lambda: _train(argv, seed, degree), ranks)
    assert {d for rank in got for step in rank.head_degrees for d in step} == {1, degree}
    counts = list(zip(*(rank.counts for rank in got), strict=True))
    assert sum(len(set(step)) > 1 for step in counts) > len(counts) / 2, counts
    assert {len(set(step)) for step in got[0].rings} > {1}, "no step mixes ring sizes"
    for rank in got:
        assert rank.grad_norms == pytest.approx(stock.grad_norms, rel=1e-6)
        if rank.losses:
            assert rank.losses == pytest.approx(stock.losses, rel=1e-6)
            assert rank.evaluations == pytest.approx(stock.evaluations, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([stock], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([stock], "params")) < 1e-11
