# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Mixture of experts under HDP equals stock Megatron on one process, whatever the plan."""

from __future__ import annotations

import functools
import importlib
import re

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import Recorded, gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

MODEL = (
    "--train-iters 4 --global-batch-size 4 --make-vocab-size-divisible-by 64 --num-experts 4 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall"
)
ROUTERS = {
    "no loss": "--moe-router-load-balancing-type none",
    "aux": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
    "seq aux, z": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.01",
    "bias": "--moe-router-load-balancing-type none --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05",
}
PP2, TP2 = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = {
    "HDP4": (4, "seq aux, z", "--hdp-capacity 64"),
    "EP2 x HDP4": (4, "no loss", "--expert-model-parallel-size 2 --hdp-capacity 64"),
    "EP4 x HDP4": (4, "seq aux, z", "--expert-model-parallel-size 4 --hdp-capacity 64"),
    "EP2 x HDP4, bias, overlap": (
        4, "bias", "--expert-model-parallel-size 2 --hdp-capacity 64 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather"
    ),
    "EP4 x HDP4, naive, full recompute": (
        4, "aux", "--expert-model-parallel-size 4 --hdp-capacity 64 --hdp-strategy naive "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "EP2 x HDP4 x PP2": (
        8, "seq aux, z", f"--expert-model-parallel-size 2 --hdp-capacity 64 {PP2}"
    ),
    "EP2 x HDP2 x TP2, experts cut": (
        4, "seq aux, z", f"--expert-model-parallel-size 2 --hdp-capacity 128 {TP2}"
    ),
    "EP4 x HDP4 x TP2, experts whole": (
        8, "bias", f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
        f"--hdp-capacity 64 {TP2}"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(corpus):
    @functools.cache
    def run(router: str, data: str = corpus) -> Recorded:
        argv = ["--data-path", data, *MODEL.split(), *ROUTERS[router].split()]
        return run_ranks(lambda: _counting(stock_pretrain, argv), 1)[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fp64_equals_stock(corpus, stock, case):
    ranks, router, more = CASES[case]
    got = _hdp(corpus, ranks, router, more)
    _compare(got, stock(router), grads="overlap" not in case)
    experts = int(re.search(r"EP(\d)", case).group(1)) if "EP" in case else 1
    if "whole" in case:  # an expert-parallel group of 4 ranks is 2 HDP ranks of TP 2
        experts //= 2
    for place in {rank.coordinates for rank in got}:
        counts = [rank.counts for rank in got if rank.coordinates == place]
        groups = [counts[at : at + experts] for at in range(0, len(counts), experts)]
        assert all(own == group[0] for group in groups for own in group), "unequal slots"


def test_one_long_sequence_among_short_ones_with_experts_over_the_domain(skewed, stock):
    got = _hdp(
        skewed,
        4,
        "seq aux, z",
        "--expert-model-parallel-size 4 --hdp-capacity 64 --hdp-strategy naive",
    )
    assert any(4 in step for step in got[0].rings)
    assert sum(rank.empty_slots for rank in got) > 0, "no zero-loss micro-batch ran"
    # Experts that few tokens reach have tiny gradients, which Adam divides by their own size.
    _compare(got, stock("seq aux, z", skewed), grads=True, params=1e-11)


def test_logged_router_losses_do_not_depend_on_the_plan(corpus):
    one = _logged(corpus, 1, "--hdp-strategy naive")
    four = _logged(corpus, 4, "--expert-model-parallel-size 2 --hdp-capacity 64")
    assert len(one) == 8
    assert four == pytest.approx(one, rel=1e-5)
    assert all(0.9 < value < 4 for value in one[::2]), "a mean over sequences is near 1"


def _hdp(corpus: str, ranks: int, router: str, more: str) -> list[Recorded]:
    argv = ["--data-path", corpus, *MODEL.split(), *ROUTERS[router].split(), "--hdp",
            *more.split()]  # fmt: skip
    return run_ranks(lambda: _counting(pretrain, argv), ranks)


def _compare(got: list[Recorded], wanted: Recorded, *, grads: bool, params: float = 1e-12) -> None:
    for rank in got:
        # Megatron takes norms of expert and other parameters together in fp32.
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
        assert rank.expert_tokens == wanted.expert_tokens
        if rank.losses:
            assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)
    if grads:
        assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < params


def _counting(run, argv: list[str]) -> Recorded:
    """Runs with the tokens per expert recorded that every update of the bias is made from."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    update, seen = module.get_updated_expert_bias, []

    def recording(tokens, *args, **kwargs):
        result = update(tokens, *args, **kwargs)
        seen.append(tokens.int().tolist())  # summed over all ranks by now
        return result

    module.get_updated_expert_bias = recording
    recorded = run(argv, keep_grads=1)
    recorded.expert_tokens = seen
    return recorded


def _logged(corpus: str, ranks: int, more: str) -> list[float]:
    """Both router losses of every step, as the log line gives them."""
    import contextlib
    import io

    argv = ["--data-path", corpus, *MODEL.split(), *ROUTERS["seq aux, z"].split(), "--hdp",
            *more.split()]  # fmt: skip

    def printed() -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            pretrain(argv)
        return out.getvalue()

    pattern = re.compile(r"\| seq_load_balancing_loss: (\S+) \| z_loss: (\S+) \|")
    found = pattern.findall(run_ranks(printed, ranks)[-1])
    return [float(value) for pair in found for value in pair]
