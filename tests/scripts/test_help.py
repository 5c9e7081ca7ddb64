# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`--help` of the launch script, in which Megatron's own text has a fault."""

from __future__ import annotations

import argparse
import contextlib
import io
import runpy
import sys

import pytest

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.runtime.help_text import repair_help
from tests.e2e.harness import ROOT


@pytest.mark.parametrize("hdp", [[], ["--hdp"]], ids=["without", "with"])
def test_launch_script_shows_every_group(megatron_on_cpu, hdp):
    def run() -> str:
        sys.argv = ["pretrain_gpt.py", "--help", *hdp]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "pretrain_gpt.py"), run_name="__main__")
        assert ended.value.code == 0
        return out.getvalue()

    (text,) = run_ranks(run, 1)
    assert "\nhdp:\n  --hdp " in text, "a group of its own"
    assert "\ntransformer configuration:\n" in text
    assert "1.10 = 10%)" in " ".join(text.split()), "what argparse cannot format as it is"


def test_only_broken_texts_change():
    parser = argparse.ArgumentParser()
    parser.add_argument("--good", help="100%% of %(dest)s")
    parser.add_argument("--bad", help="a bare (10%) here")
    with pytest.raises(ValueError, match="unsupported format character"):
        parser.format_help()
    assert repair_help(parser) == ["--bad"]
    assert repair_help(parser) == []
    assert "100% of good" in parser.format_help()
    assert "a bare (10%) here" in parser.format_help()
