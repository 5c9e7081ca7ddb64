# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A window, learned sinks and partial RoPE equal stock Megatron's own attention on one process."""

from __future__ import annotations

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

KINDS = {
    "window in every second layer, learned sinks, half of RoPE": (
        4,
        "--window-size 24,0 --window-attn-skip-freq 2 --softmax-type learnable "
        "--rotary-percent 0.5",
        "--hdp-strategy naive --hdp-capacity 64",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_equals_stock(corpus, kind):
    ranks, model, more = KINDS[kind]
    argv = ["--data-path", corpus, "--train-iters", "3", "--global-batch-size", "4", *model.split()]
    wanted = run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]
    got = run_ranks(lambda: pretrain([*argv, "--hdp", *more.split()], keep_grads=1), ranks)
    assert max(size for rank in got for step in rank.rings for size in step) > 1
    for rank in got:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)  # Megatron reports in fp32
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-12)
        assert rank.evaluations == pytest.approx(wanted.evaluations, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12
    sinks = [name for name in got[0].params if name.endswith("softmax_offset")]
    assert len(sinks) == 2
