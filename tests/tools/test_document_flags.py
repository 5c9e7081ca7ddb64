# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""docs/flags.md is what the parsers say today."""

from __future__ import annotations

import re

from megatron_hdp.runtime import options
from tools import document_flags


def test_page_is_what_the_parsers_say():
    page = document_flags.PAGE.read_text()
    assert page == document_flags.page(), "run python tools/document_flags.py"
    rows = re.findall(r"^\| `--.*$", page, re.MULTILINE)
    unexplained = [row for row in rows if row.endswith("|  |")]
    assert not unexplained, "flags without a help text"


def test_another_choice_default_or_flag_changes_the_page(monkeypatch):
    default = options.HdpOptions(plan_ahead=31)
    monkeypatch.setattr(options, "HdpOptions", lambda: default)
    monkeypatch.setattr(options, "STRATEGIES", ("auto", "best"))
    monkeypatch.setattr(options, "_add_loader_arguments", lambda group, default: None)
    page = document_flags.page()
    assert "| int | `31` |" in page
    assert "| `auto`, `best` |" in page
    assert "--hdp-loader-servers" not in page
