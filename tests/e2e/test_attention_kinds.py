# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Windows, sinks and kinds of RoPE equal stock Megatron's own attention on one process."""

from __future__ import annotations

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

WINDOW = "--window-size 24,0 --window-attn-skip-freq 2"
TP2 = "--tensor-model-parallel-size 2 --hdp-strategy naive --hdp-capacity 128"

# A name's model; how many ranks run it, and how.
KINDS = {
    "learned sinks, half of RoPE": (
        f"{WINDOW} --softmax-type learnable --rotary-percent 0.5",
        (4, "--hdp-strategy naive --hdp-capacity 64"),
        (4, f"{TP2} --sequence-parallel --recompute-granularity full "
         "--recompute-method uniform --recompute-num-layers 1"),
    ),
    "sinks of zero, interleaved RoPE": (
        f"{WINDOW} --softmax-type off-by-one --rotary-interleaved",
        (4, f"{TP2} --recompute-granularity selective --recompute-modules core_attn"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_equals_stock(corpus, kind):
    model, *runs = KINDS[kind]
    argv = ["--data-path", corpus, "--train-iters", "3", "--global-batch-size", "4", *model.split(),
            "--make-vocab-size-divisible-by", "64"]  # fmt: skip
    wanted = run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]
    for ranks, more in runs:
        got = run_ranks(
            lambda more=more: pretrain([*argv, "--hdp", *more.split()], keep_grads=1), ranks
        )
        assert max(size for rank in got for step in rank.rings for size in step) > 1
        # With TP, Megatron takes the norm's maximum in fp32; it reports losses so always.
        digits = 1e-6 if TP2 in more else 1e-12
        for rank in got:
            assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)
            assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=digits)
            assert rank.evaluations == pytest.approx(wanted.evaluations, rel=1e-6)
        assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
        assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12
        sinks = [name for name in got[0].params if name.endswith("softmax_offset")]
        assert len(sinks) == (2 if "learnable" in model else 0)
