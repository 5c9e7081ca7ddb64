# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Training with heads split over rings equals stock Megatron on one process; what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.cost import CostModel
from tests.e2e.harness import gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

HALF = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
"""One layer of two: were both recomputed, the exchanges would cost more than the hop they save."""
# All ranks' options; the degrees that must occur.
RUNS = {
    "4 ranks, locals behind rings": (
        "--hdp-capacity 90 --hdp-offload-ratio 0.5 --num-layers 4", {1, 2, 4}
    ),
    "TP2 x HDP2, recompute": (
        f"--hdp-strategy naive --hdp-capacity 128 --tensor-model-parallel-size 2 "
        f"--sequence-parallel {HALF}", {1, 2}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def slow_links(tmp_path_factory) -> str:
    """A cost model in which only bytes count."""
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    preset = dataclasses.asdict(CostModel.load("cpu-estimate"))
    preset.update(
        name="slow links", latency_s=0.0, inside_bytes_s=1e6, across_bytes_s=1e6, fixed_s=0.5
    )
    path.write_text(json.dumps(preset))
    return str(path)


@pytest.mark.parametrize("case", RUNS)
def test_fp64_equals_stock(corpus, slow_links, case):
    more, degrees = RUNS[case]
    argv = ["--data-path", corpus, "--train-iters", "4", "--global-batch-size", "4",
            "--num-query-groups", "4", "--make-vocab-size-divisible-by", "64",
            "--softmax-type", "learnable"]  # fmt: skip
    hdp = ["--hdp", "--hdp-head-parallel", "auto", "--hdp-profile", slow_links, *more.split()]
    layers = ["--num-layers", "4"] if "--num-layers 4" in more else []
    wanted = run_ranks(lambda: stock_pretrain([*argv, *layers], keep_grads=1), 1)[0]
    got = run_ranks(lambda: pretrain([*argv, *hdp], keep_grads=1), 4)
    assert {d for rank in got for step in rank.head_degrees for d in step} == degrees
    assert any(rank.mixed for rank in got) or "TP2" in case
    # With TP, Megatron takes the norm's maximum in fp32; it reports losses so always.
    digits = 1e-6 if "TP2" in case else 1e-12
    for rank in got:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=digits)
        assert rank.evaluations == pytest.approx(wanted.evaluations, rel=1e-6)
    assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12
