# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's log line stays byte for byte what it is; one `hdp:` line follows it."""

from __future__ import annotations

import re

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import pretrain

TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+|\(ms\): +[\d.]+")


def _printed(argv: list[str]) -> list[str]:
    """What one rank prints while it trains."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pretrain(argv, fp64=False)
    return out.getvalue().splitlines()


def test_one_line_follows_megatrons(corpus):
    argv = ["--data-path", corpus, "--train-iters", "4", "--log-interval", "2", "--hdp",
            "--hdp-capacity", "128"]  # fmt: skip
    printed = run_ranks(lambda: _printed(argv), 2)
    lines = printed[1]
    at = [i for i, line in enumerate(lines) if "] iteration " in line]
    assert len(at) >= 2
    for i in at:
        following = [line for line in lines[i + 1 : i + 3] if line.startswith("hdp:")]
        assert len(following) == 1
        assert re.fullmatch(
            r"hdp: rings( \d+x\d+)+ \| balance \d\.\d{3} \| travelled [\d.]+% \| "
            r"micro-batches \d+-\d+ \| exposed planning [\d.]+ ms \| "
            r"exposed loading [\d.]+ ms \| read \d+ tokens in [\d.]+ ms \| auto",
            following[0],
        )
    assert sum(line.startswith("hdp: rings") for line in lines) == len(at)
    assert any(line.startswith("hdp: domain of 2 ranks") for line in printed[0])


def test_megatrons_line_has_the_same_fields_with_and_without_hdp(corpus):
    argv = ["--data-path", corpus, "--train-iters", "2", "--calculate-per-token-loss"]

    def shape(more: list[str]) -> list[str]:
        lines = run_ranks(lambda: _printed([*argv, *more]), 1)[0]
        found = [TIMES.sub("T", line) for line in lines if "] iteration " in line]
        return [re.sub(r"[\d.]+(E[-+]\d+)?", "N", line) for line in found]

    assert shape(["--hdp"]) == shape([])
