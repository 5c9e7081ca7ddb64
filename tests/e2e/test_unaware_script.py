# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`megatron_hdp.enable()` alone turns HDP on for a script that knows nothing of it."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import megatron_hdp
from megatron_hdp.cpu.launch import RankFailedError, run_ranks
from tests.e2e.harness import BASE, ROOT, Recorded, gather, record, worst_error

SCRIPT = Path(__file__).with_name("upstream_script.py")
STEPS = ["--train-iters", "6"]


def _run(argv: list[str], enabled: bool, script: Path = SCRIPT, **options) -> Recorded:
    """The script, unchanged, on one rank; with HDP in front of it or not."""
    os.chdir(SCRIPT.parent)
    sys.argv = [str(script), *BASE, *argv, "--calculate-per-token-loss"]
    if enabled:
        megatron_hdp.enable(**options)
    return record(lambda: runpy.run_path(str(script), run_name="__main__"), True, 1)


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ("", 2, {"capacity": 128}),
        ("", 4, {"capacity": 70}),
        ("--tensor-model-parallel-size 2", 4, {"capacity": 128}),
        ("--pipeline-model-parallel-size 2", 4, {"capacity": 128}),
    ],
    ids=["2 ranks", "4 ranks", "TP2", "PP2"],
)
def test_same_losses_with_and_without_enable(corpus, layout, ranks, options):
    argv = ["--data-path", corpus, *STEPS, *layout.split()]
    without = run_ranks(lambda: _run(argv, False), ranks)
    with_hdp = run_ranks(lambda: _run(argv, True, strategy="naive", **options), ranks)
    assert all(rank.rings and max(map(max, rank.rings)) > 1 for rank in with_hdp)
    for one, other in zip(with_hdp, without, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-6)
        assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-12)
    assert worst_error(gather(with_hdp, "params"), gather(without, "params")) < 1e-11


def test_the_block_of_the_readme_in_front_of_the_imports(corpus, tmp_path):
    """As documented: no options but the command line's."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "own_script.py"
    before, imports = SCRIPT.read_text().split("from megatron", 1)
    path.write_text(f"{before}{block}\nfrom megatron{imports}")
    argv = ["--data-path", corpus, *STEPS]
    without = run_ranks(lambda: _run(argv, False), 2)
    flags = ["--hdp-strategy", "naive", "--hdp-capacity", "128"]
    with_hdp = run_ranks(lambda: _run([*argv, *flags], False, script=path), 2)
    assert all(max(map(max, rank.rings)) > 1 for rank in with_hdp)
    assert with_hdp[0].losses == pytest.approx(without[0].losses, rel=1e-6)
    assert worst_error(gather(with_hdp, "params"), gather(without, "params")) < 1e-11


def test_static_context_parallel_of_the_launch_line_is_no_obstacle(corpus):
    """Stock local attention refuses CP > 1; under HDP the same line runs, and gives the same."""
    argv = ["--data-path", corpus, *STEPS]
    without = run_ranks(lambda: _run(argv, False), 2)
    cp = [*argv, "--context-parallel-size", "2"]
    with_hdp = run_ranks(lambda: _run(cp, True, strategy="naive"), 4)
    assert with_hdp[0].losses == pytest.approx(without[0].losses, rel=1e-6)
    assert worst_error(gather(with_hdp, "params"), gather(without, "params")) < 1e-11


@pytest.mark.slow
def test_a_static_checkpoint_goes_on_under_hdp_and_back(corpus, tmp_path):
    """Two steps each: 2 ranks without, 4 ranks with, 2 ranks without; parameters rest in fp32."""
    argv = ["--data-path", corpus, *STEPS, "--use-distributed-optimizer", "--ckpt-format"]
    argv += ["torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    whole = run_ranks(lambda: _run(argv, False), 2)
    argv += ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    losses = []
    for last, ranks, enabled in (("2", 2, False), ("4", 4, True), ("6", 2, False)):
        part = [*argv, "--exit-interval", last]
        options = {"strategy": "naive", "capacity": 128} if enabled else {}
        ends = run_ranks(lambda a=part, e=enabled, o=options: _run(a, e, **o), ranks)
        assert any(map(len, ends[0].rings)) == enabled
        losses += ends[0].losses
    assert losses == pytest.approx(whole[0].losses, rel=1e-8)
    assert worst_error(gather(ends, "params"), gather(whole, "params")) < 1e-6


def test_disable_restores_the_very_same_objects(megatron_on_cpu):
    def check() -> int:
        from megatron.core import utils
        from megatron.training import training

        from megatron_hdp.patches import patch_table

        before = {patch.target: patch.locate()[2] for patch in patch_table()}
        by_value = training.get_batch_on_this_tp_rank
        sys.argv = ["script"]
        megatron_hdp.enable()
        megatron_hdp.enable()
        for target, original in before.items():
            patch = next(p for p in patch_table() if p.target == target)
            assert patch.locate()[2] is not original, target
            assert patch.fits(), target
        assert training.get_batch_on_this_tp_rank is utils.get_batch_on_this_tp_rank
        module = type(sys)("imported_meanwhile")
        module.get_batch = utils.get_batch_on_this_tp_rank
        sys.modules["imported_meanwhile"] = module
        megatron_hdp.disable()
        megatron_hdp.disable()
        for patch in patch_table():
            assert patch.locate()[2] is before[patch.target], patch.target
        assert training.get_batch_on_this_tp_rank is by_value
        assert module.get_batch is by_value
        return len(before)

    assert run_ranks(check, 1) == [8]


def test_all_or_nothing_when_a_signature_differs(megatron_on_cpu):
    def check() -> str:
        from megatron.training import training

        from megatron_hdp.patches import PatchError, is_applied, patch_table

        def training_log(loss_dict, something_new): ...

        training.training_log = training_log
        sys.argv = ["script"]
        try:
            megatron_hdp.enable()
        except PatchError as error:
            assert not any(is_applied(patch) for patch in patch_table())
            assert training.training_log is training_log
            return str(error)
        return "no error"

    (message,) = run_ranks(check, 1)
    assert "megatron.training.training:training_log" in message
    assert "something_new" in message
    assert "doctor" in message


def test_a_loss_function_that_averages_is_refused(corpus):
    def run():
        script = SCRIPT.read_text().replace("return loss, tokens, {", "return loss / tokens, {")
        path = Path(corpus).with_name("averaging_script.py")
        path.write_text(script)
        sys.argv = [str(path), *BASE, "--data-path", corpus, *STEPS]
        megatron_hdp.enable()
        runpy.run_path(str(path), run_name="__main__")

    with pytest.raises(RankFailedError, match="loss function returned 2 values"):
        run_ranks(run, 1)
