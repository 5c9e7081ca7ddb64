# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Bad input ends in one sentence, exit code not 0, before any process group exists."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from tests.e2e.harness import BASE, ROOT, SCRIPT


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """One process of a world of two: it would hang in init_process_group, were it to get there."""
    environment = dict(
        os.environ, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", PYTHONWARNINGS="ignore",
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, str(SCRIPT), *BASE, "--train-iters", "1", "--hdp", "--hdp-cpu", *argv],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def _truncated(corpus: str, tmp_path) -> str:
    prefix = str(tmp_path / "short")
    shutil.copy(f"{corpus}.idx", f"{prefix}.idx")
    with open(f"{corpus}.bin", "rb") as source, open(f"{prefix}.bin", "wb") as target:
        target.write(source.read(1000))
    return prefix


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data-path", "{tmp}/nothing"], ["--data-path", "nothing.idx does not exist"]),
        (["--data-path", "{truncated}"], ["short.bin has 1000 bytes", "truncated"]),
        (
            ["--data-path", "{corpus}", "--seq-length", "128"],
            ["--seq-length 128 is shorter than", "longest has 256 tokens", "raise --seq-length"],
        ),
        (["--data-path", "{corpus}", "--hdp-capacity", "0"], ["--hdp-capacity 0", "at least one"]),
        (
            ["--data-path", "{corpus}", "--hybrid-context-parallel"],
            ["--hybrid-context-parallel", "use --hdp alone"],
        ),
        (
            [
                "--data-path",
                "{corpus}",
                "--num-experts",
                "4",
                "--moe-token-dispatcher-type",
                "alltoall",
                "--moe-expert-capacity-factor",
                "1.0",
            ],
            ["--moe-expert-capacity-factor 1.0", "without --hdp"],
        ),
        (
            ["--data-path", "{corpus}", "--attention-dropout", "0.1"],
            ["--attention-dropout 0.1", "pass --attention-dropout 0.0"],
        ),
        (
            ["--data-path", "{corpus}", "--window-size", "64,8"],
            ["--window-size 64,8", "attention is causal"],
        ),
        (
            ["--data-path", "{corpus}", "--hdp-offload", "--cpu-offloading-num-layers", "1"],
            ["--cpu-offloading-num-layers 1", "use --hdp-offload instead"],
        ),
        (
            ["--data-path", "{corpus}", "--hdp-cross-entropy", "fused"],
            ["--hdp-cross-entropy fused", "need a GPU", "pass --hdp-cross-entropy chunked"],
        ),
        (
            ["--data-path", "{corpus}", "--hdp-cross-entropy", "chunked", "--use-mup"],
            ["--use-mup", "chunked", "pass --hdp-cross-entropy megatron"],
        ),
        (
            ["--data-path", "{corpus}", "--hdp-ray-address", "127.0.0.1:1"],
            ["--hdp-ray-address 127.0.0.1:1", "needs --hdp-loader ray"],
        ),
    ],
    ids="no-index truncated context capacity hybrid-cp moe dropout window offloads fused "
    "mup loader".split(),
)
def test_one_sentence_and_no_process_group(corpus, tmp_path, argv, words):
    names = {"corpus": corpus, "tmp": tmp_path, "truncated": _truncated(corpus, tmp_path)}
    done = _run([argument.format(**names) for argument in argv])
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("megatron_hdp: ")
    for word in words:
        assert word in message
    assert "Traceback" not in done.stderr


def test_every_refused_attribute_is_one_of_megatrons(megatron_on_cpu):
    """A rule whose attribute Megatron renamed would never fire."""
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    from megatron_hdp.runtime.attention.support import SETTINGS
    from megatron_hdp.runtime.cross_entropy.support import CHUNKED_CANNOT
    from megatron_hdp.runtime.validation import RULES

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments = {action.dest for action in parser._actions}
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {rule.attribute for rule in RULES} <= arguments
    # Those of attention are looked for on the model's configuration too, and some are only there.
    only_configured = {field.name for field in dataclasses.fields(TransformerConfig)} - arguments
    settings = [rule for rule in SETTINGS if rule.attribute not in only_configured]
    assert {rule.attribute for rule in settings} <= arguments
    assert {rule.flag for rule in (*RULES, *settings)} <= flags
    assert CHUNKED_CANNOT.keys() <= arguments
    assert set(CHUNKED_CANNOT.values()) <= flags
