# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""--hdp-attention transformer_engine in Megatron's real loop equals stock Megatron, in fp64.

The recorder stands where Transformer Engine's module does; groups, plans, layouts, pipeline and
Megatron's own wrapper are real.
"""

from __future__ import annotations

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain
from tests.transformer_engine import recorder

STEPS = 4

CASES = {
    "rings 1-4, few groups, static CP kept": (
        "--hdp-strategy naive --hdp-capacity 64 --hdp-te-groups 5 --context-parallel-size 2",
        {1, 2, 3, 4},
    ),
    "pipeline, recompute": (
        "--hdp-strategy pp-balance --hdp-capacity 128 --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {1, 2},
    ),
}


def _with_recorder(argv, **kwargs):
    """The product's run on this rank, and what every attention call was given."""
    from megatron_hdp.runtime.attention import backend_support, transformer_engine

    transformer_engine.refusal = lambda *args: None
    backend_support.transformer_engine_refusals = lambda args: []
    recorder.install()
    calls = []
    forward = recorder.DotProductAttention.forward

    def recording(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        calls.append(self.calls[-1]._replace(stream=None))
        return out

    recorder.DotProductAttention.forward = recording
    recorded = pretrain(["--hdp-attention", "transformer_engine", *argv], **kwargs)
    from megatron_hdp.runtime import session

    return recorded, calls, len(session.current_session().ring_groups)


def _arguments(corpus, more):
    return ["--data-path", corpus, "--train-iters", str(STEPS), "--global-batch-size", "4",
            "--make-vocab-size-divisible-by", "64", *more.split()]  # fmt: skip


@pytest.fixture(scope="module")
def stock(corpus):
    argv = _arguments(corpus, "")
    return run_ranks(lambda: stock_pretrain(argv, fp64=True, keep_grads=1), 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fp64_equals_stock(corpus, stock, case):
    more, ring_sizes = CASES[case]
    argv = [*_arguments(corpus, more), "--hdp"]
    results = run_ranks(lambda: _with_recorder(argv, keep_grads=1), 4)
    got = [recorded for recorded, _, _ in results]
    sizes = {len(call.group_ranks or [0]) for _, calls, _ in results for call in calls}
    assert sizes >= ring_sizes
    assert "few" not in case or all(count <= 5 for _, _, count in results)
    for rank in got:
        # Megatron takes the norm's maximum over model-parallel ranks in fp32.
        assert rank.grad_norms == pytest.approx(stock.grad_norms, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([stock], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([stock], "params")) < 1e-12
