# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The commands of a Markdown page: those in its bash fences, and those in its code spans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

FENCES = {"bash", "python", "text", "json", "yaml", "{include}", "{toctree}", "{figure}"}
"""A command stands in `bash`; a fence of another name could hide one."""
MARKER = re.compile(r"<!-- not run:(.*)-->")
SPAN = re.compile(r"(?<!`)`((?:\./|scripts/|tests/|tools/|python )[^`]*)`(?!`)")
SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
YOURS = "<your arguments>"


@dataclass(frozen=True)
class Command:
    """One command of a page, or what is wrong with the page there."""

    place: str
    """Page and line."""
    words: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables in front of the words."""
    excuse: str = ""
    """Why it cannot be run, as the page says."""
    is_span: bool = False
    """In the text: may be the name of a program, without its arguments."""
    fault: str = ""


def read(page: str, text: str) -> Iterator[Command]:
    """Commands and faults of a page, in its order."""
    fence, opened, excuse, block = "", 0, "", ""
    prose: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        marker = MARKER.search(line)
        if fence and line.strip().startswith("```"):
            if fence == "bash":
                yield from _block(f"{page}:{opened}", block, excuse)
            fence = excuse = block = ""
        elif fence:
            block += line + "\n"
        elif line.strip().startswith("```"):
            fence, opened = (line.strip("` ").split() or ["without a name"])[0], number
            if fence not in FENCES:
                yield Command(f"{page}:{number}", fault=f"a fence {fence}: use {sorted(FENCES)}")
            if excuse and fence != "bash":
                yield Command(f"{page}:{number}", fault="a marker 'not run' before no bash fence")
        elif marker:
            excuse = marker[1].strip()
            if not excuse:
                yield Command(f"{page}:{number}", fault="'not run' without a reason")
        else:
            if excuse:
                yield Command(f"{page}:{number}", fault="a marker 'not run' before no bash fence")
                excuse = ""
            prose.append(line)
            for span in SPAN.findall(line):
                yield from _commands(f"{page}:{number}", span, "", is_span=True)
    if fence:
        yield Command(f"{page}:{opened}", fault="the fence is not closed")


def _block(place: str, block: str, excuse: str) -> Iterator[Command]:
    if not block.strip():
        yield Command(place, fault="an empty fence")
    for line in block.replace("\\\n", " ").splitlines():
        yield from _commands(place, line, excuse)


def _commands(place: str, line: str, excuse: str, is_span: bool = False) -> Iterator[Command]:
    """A line's commands: apart at | && || and ;, without where their output goes."""
    lexer = shlex.shlex(line.replace(YOURS, "YOURS"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError as error:
        yield Command(place, fault=f"{line}: {error}")
        return
    words: list[str] = []
    for token, before in zip([*tokens, ";"], ["", *tokens], strict=True):
        if before in (">", ">>") or token in (">", ">>"):
            continue
        if set(token) & set("<>()&|;") and token not in (";", "|", "&&", "||"):
            yield Command(place, fault=f"{line}: {token} is not understood; only {YOURS} is filled")
            return
        if token not in (";", "|", "&&", "||"):
            words.append(YOURS if token == "YOURS" else token)
            continue
        split = next((n for n, word in enumerate(words) if not SETTING.fullmatch(word)), len(words))
        settings = tuple(tuple(word.split("=", 1)) for word in words[:split])
        if words:
            yield Command(place, tuple(words[split:]), settings, excuse, is_span)
        words = []
