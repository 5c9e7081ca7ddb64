# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What docs/troubleshooting.md quotes is what the sources say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"


def sentences() -> str:
    """Every string of the sources, a line each; `...` where a value goes."""
    texts = []
    for path in (*(ROOT / "megatron_hdp").rglob("*.py"), *(ROOT / "patches").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


def said(quote: str, sources: str) -> bool:
    """Whether one string has the quote's fixed parts in their order."""
    parts = [re.escape(part.strip()) for part in quote.split("...") if part.strip()]
    return re.search(".*".join(parts), sources) is not None


def quotes(text: str) -> list[str]:
    """First cells of tables, and what doctor is said to print."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    found = [quote for row in rows for quote in re.findall("`([^`]+)`", row[0])]
    return found + [q for row in rows if "`doctor`:" in row[1] for q in row[1].split("`")[3::2]]


def test_what_the_page_quotes_is_in_the_sources():
    sources = sentences()
    quoted = quotes(PAGE.read_text())
    assert len(quoted) > 50
    assert [quote for quote in quoted if not said(quote, sources)] == []
    assert not said("a sequence of ... tokens does not suit ... ranks", sources)
