# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rules of the project's own programs: its commands, its scripts, its tests."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.__main__ import COMMANDS
from megatron_hdp.__main__ import main as megatron_hdp
from tests.doc_commands.errors import WrongCommandError
from tests.doc_commands.parsing import first_parse
from tests.e2e.harness import ROOT

SMALLER = ["--steps", "1", "--tokens", "4M"]
"""Behind `simulate`'s own arguments: a page's take up to a minute."""


def is_named(words: list[str]) -> bool:
    """Whether the words are a module of ours, or a command, without arguments."""
    if words == ["megatron_hdp.cpu.launch"]:
        return True
    return words[0] == "megatron_hdp" and (len(words) == 1 or words[1:] in [[c] for c in COMMANDS])


def ours(words: list[str]) -> None:
    """`python -m megatron_hdp`: everything runs, but `profile` ends where it would measure."""
    given = words[1:]
    if given[:1] == ["profile"]:
        _profile(given)
        return
    smaller = SMALLER if given[:1] == ["simulate"] else []
    if megatron_hdp([*given, *smaller]):
        raise WrongCommandError(" ".join(given))
    written = [given[n + 1] for n, word in enumerate(given) if word in ("--picture", "--trace")]
    small = [name for name in written if Path(name).stat().st_size < 1000]
    if small:
        raise WrongCommandError(f"{small} were not written as a whole")


def _profile(given: list[str]) -> None:
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hdp.cpu import launch
    from megatron_hdp.runtime.profiling import measure

    def forked(body: object, ranks: int, **_: object) -> None:
        os.environ["WORLD_SIZE"] = str(ranks)
        body()

    def validated(line: object, *_: object) -> None:
        sys.argv = ["profile", *line.argv]
        parse_and_validate_args()
        raise SystemExit(0)

    launch.run_ranks, measure.measure = forked, validated
    if "--hdp-cpu" not in given:
        given = [*given, "--hdp-cpu"]
    if megatron_hdp(given):
        raise WrongCommandError(" ".join(given))


def script(words: list[str]) -> None:
    """A Python file: its own parser takes the arguments; without a parser it takes none."""
    path, given = words[0], words[1:]
    if ".parse_args(" not in (text := Path(path).read_text()) and ".parse_known" not in text:
        compile(text, path, "exec")
        if given:
            raise WrongCommandError(f"{path} takes no arguments: {given}")
        return
    sys.argv = [path, *given]
    sys.path.insert(0, str(Path(path).parent))
    args, left = first_parse(lambda: runpy.run_path(path, run_name="__main__"))
    if left and getattr(args, "tokenizer_type", None) is None:
        raise WrongCommandError(f"{path}: unrecognized arguments: {left}")


def shell(words: list[str]) -> None:
    """A shell script of the project: there, executable, of sound syntax, and without arguments."""
    path = words[0]
    if not os.access(path, os.X_OK):
        raise WrongCommandError(f"{path}: not executable")
    subprocess.run(["bash", "-n", path], check=True)
    if words[1:]:
        raise WrongCommandError(f"{path} takes no arguments: {words[1:]}")


def tests(words: list[str]) -> None:
    """pytest collects at least one test from the arguments, or from a test's id."""
    given = words if words[0].startswith("tests/") else words[1:]
    with contextlib.chdir(ROOT):
        code = pytest.main(["--collect-only", *given])
    if code:
        raise WrongCommandError(f"pytest {' '.join(given)}: {pytest.ExitCode(code).name}")
