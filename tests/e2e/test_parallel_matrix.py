# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""TP x PP x HDP against stock Megatron on one process."""

from __future__ import annotations

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import gather, pretrain, worst_error
from tests.e2e.oracle import stock_pretrain

# A vocabulary that every TP size here pads to the same, and a depth that PP 4 divides.
MODEL = ["--num-layers", "4", "--train-iters", "4", "--make-vocab-size-divisible-by", "64"]


@pytest.fixture(scope="module")
def stock(corpus):
    runs = {}

    def run(packs: int):
        if packs not in runs:
            argv = ["--data-path", corpus, *MODEL, "--global-batch-size", str(packs)]
            runs[packs] = run_ranks(lambda: stock_pretrain(argv, keep_grads=1), 1)[0]
        return runs[packs]

    return run


CASES = {
    "PP2 x HDP2": (4, 4, "--pipeline-model-parallel-size 2 --hdp-capacity 128"),
    "PP2 x HDP3": (6, 6, "--pipeline-model-parallel-size 2 --hdp-capacity 128"),
    "PP4 x HDP2": (8, 4, "--pipeline-model-parallel-size 4 --hdp-capacity 128"),
    "TP2 x HDP2": (4, 4, "--tensor-model-parallel-size 2 --hdp-capacity 128"),
    "TP2 x HDP4": (8, 4, "--tensor-model-parallel-size 2 --hdp-capacity 64"),
    "TP2 x PP2 x HDP2": (
        8, 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hdp-capacity 128"
    ),
    "PP2 x VPP2 x HDP2": (
        4, 4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--hdp-capacity 128"
    ),
    "PP2 x HDP2, static CP kept": (
        4, 4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"
    ),
}  # fmt: skip
OPTIONS = {
    "plain": "",
    "full recompute": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "selective recompute": "--recompute-granularity selective --recompute-modules core_attn",
}


SEQUENCE_PARALLEL = "--sequence-parallel"
OPTIONS["sequence parallel"] = SEQUENCE_PARALLEL
OPTIONS["sequence parallel, full recompute"] = f"{SEQUENCE_PARALLEL} {OPTIONS['full recompute']}"
RUNS = [
    (case, option)
    for case in CASES
    for option in OPTIONS
    if "TP2" in case or SEQUENCE_PARALLEL not in OPTIONS[option]
    if "VPP" not in case or option != "selective recompute"
]
WITH_AUTO = "overlap"
"""The option under which pipelines keep `auto`, which makes counts equal where it can; under the
others `pp-balance` plans, which never does."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "option"), RUNS)
def test_fp64_equals_stock(corpus, stock, case, option):
    ranks, packs, more = CASES[case]
    argv = ["--data-path", corpus, *MODEL, "--global-batch-size", str(packs), "--hdp",
            *more.split(), *OPTIONS[option].split()]  # fmt: skip
    unequal = "PP" in case and "VPP" not in case and option != WITH_AUTO
    if unequal:
        argv += ["--hdp-strategy", "pp-balance"]
    got = run_ranks(lambda: pretrain(argv, keep_grads=1), ranks)
    if "VPP" in case:  # equal slots in whole groups; stock has as many as the step has sequences
        assert all(count % 2 == 0 for rank in got for count in rank.counts)
        assert len({tuple(rank.counts) for rank in got}) == 1
    elif unequal:
        steps = list(zip(*(rank.counts for rank in got), strict=True))
        assert sum(len(set(counts)) > 1 for counts in steps) > len(steps) / 2, steps
    wanted = stock(packs)
    for rank in got:
        # Megatron takes the norm's maximum over model-parallel ranks in fp32.
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
        if rank.losses:
            assert rank.losses == pytest.approx(wanted.losses, rel=1e-6)
    if option != "overlap":  # there a rank's main_grad is whole in its own shard only
        assert worst_error(gather(got, "grads"), gather([wanted], "grads")) < 1e-12
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-12


WHOLE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
WHOLE += f" --hdp-capacity 128 {OPTIONS['overlap']}"


def _without(flag: str, argv: list[str]) -> list[str]:
    return [argument for argument in argv if argument != flag]


def _tied() -> None:
    from tests.e2e import harness, oracle

    harness.BASE = oracle.BASE = _without("--untie-embeddings-and-output-weights", harness.BASE)


@pytest.mark.slow
def test_tied_embeddings_and_a_clip_that_bites_equal_stock(corpus):
    """The embedding's two copies, on the first and the last stage, end bitwise equal (`gather`)."""
    argv = ["--data-path", corpus, *MODEL, "--clip-grad", "0.1"]

    def run_stock():
        _tied()
        return stock_pretrain(argv)

    def run_hdp():
        _tied()
        return pretrain([*argv, "--hdp", *WHOLE.split()])

    wanted = run_ranks(run_stock, 1)[0]
    got = run_ranks(run_hdp, 8)
    assert min(wanted.grad_norms) > 0.2
    assert not any("output_layer" in name for name in wanted.params)
    for rank in got:
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
    # Megatron computes the clip coefficient in fp32.
    assert worst_error(gather(got, "params"), gather([wanted], "params")) < 1e-6


def _with_one_wrong(what: str, argv: list[str]):
    """Changes one token's label or position, on HDP rank 1, in the first micro-batch of step 0."""
    from megatron_hdp.data.loading import local

    read, planted = local.read_batch, []

    def read_batch(*args):
        from megatron_hdp.runtime.session import current_session

        batch = read(*args)
        if not planted and current_session().require_domain().rank == 1:
            at = int(batch["loss_mask"][0].argmax())
            batch[what][0, at] = (batch[what][0, at] + 1) % 120
            planted.append(True)
        return batch

    local.read_batch = read_batch
    return pretrain(argv, keep_grads=1)


@pytest.mark.slow
def test_one_wrong_label_breaks_the_tolerance(corpus, stock):
    ranks, packs, more = CASES["PP2 x HDP2"]
    argv = ["--data-path", corpus, *MODEL, "--global-batch-size", str(packs), "--hdp"]
    argv += more.split()
    got = run_ranks(lambda: _with_one_wrong("labels", argv), ranks)
    error = worst_error(gather(got, "grads"), gather([stock(packs)], "grads"))
    assert error > 1e-4  # 1e-12 is the tolerance


@pytest.mark.slow
def test_bf16_is_near_stock(corpus):
    argv = ["--data-path", corpus, *MODEL, "--bf16"]
    wanted = run_ranks(lambda: stock_pretrain(argv, fp64=False), 1)[0]
    got = run_ranks(lambda: pretrain([*argv, "--hdp", *WHOLE.split()], fp64=False), 8)
    for rank in got:
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-2)
        if rank.losses:
            assert rank.losses == pytest.approx(wanted.losses, rel=2e-3)
