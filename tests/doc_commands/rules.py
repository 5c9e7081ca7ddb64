# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What holds of a command, by its program; one that no rule knows is a problem unless excused.

A rule raises, or returns the line that its program would start, which is checked in turn.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.doc_commands import launching, programs
from tests.doc_commands.errors import UnknownProgramError, WrongCommandError
from tests.doc_commands.pages import YOURS, Command
from tests.doc_commands.workspace import PLACEHOLDERS, YOUR_ARGUMENTS

Rule = Callable[[list[str]], list[str] | None]
EVERYWHERE = re.compile(r"(CUDA|NCCL|TORCH|PYTORCH|OMP)_[A-Z_]+")
"""Environment variables that any command may have in front."""
PYTHONS = ("python", "python3", ".venv/bin/python")


def problem(command: Command) -> str | None:
    """What is wrong with a command, or None. Changes this process: call it in a child."""
    if command.fault:
        return command.fault
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # the child's own
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _check(command)
    except UnknownProgramError as error:
        return None if command.excuse else f"{error}: no rule, and no <!-- not run: REASON -->"
    except WrongCommandError as error:
        return f"{error} {_last(said)}"
    except SystemExit as error:
        return None if error.code in (0, None) else f"{error.code} {_last(said)}"
    return None


def runs_tests(command: Command) -> bool:
    """Whether a command is pytest's: many such can be looked at in one child, which is quicker."""
    return re.match(r"(\./)?(scripts/test\.sh|tests/)", " ".join(command.words)) is not None


def _last(said: io.StringIO) -> str:
    return " ".join(said.getvalue().strip().splitlines()[-3:])


def _check(command: Command) -> None:
    """Follows a command from program to program.

    Raises:
        UnknownProgramError: no rule is for it.
        WrongCommandError, SystemExit: what a rule or a parser says.
    """
    words: list[str] | None = []
    for word in command.words:
        words += YOUR_ARGUMENTS if word == YOURS else [PLACEHOLDERS.get(word, word)]
    if command.is_span and _is_mention(words):
        return
    if command.is_span and words[0].endswith("pretrain_gpt.py"):
        words[1:1] = YOUR_ARGUMENTS
    read = launching.settings_of(words[:1])
    for name, value in command.settings:
        if name not in read and not EVERYWHERE.fullmatch(name):
            raise WrongCommandError(f"{name}=: {words[0]} does not read it")
        os.environ[name] = PLACEHOLDERS.get(value, value)
    while words:
        words = _rule(words)(words)


def _is_mention(words: list[str]) -> bool:
    """Whether the span only names a file or a program, which then must exist."""
    if len(words) == 1 and "::" not in words[0]:
        if not list(Path().glob(words[0])):
            raise WrongCommandError(f"{words[0]}: no such file")
        return True
    return words[:2] == ["python", "-m"] and programs.is_named(words[2:])


def _rule(words: list[str]) -> Rule:
    program, script = words[0], Path(words[0])
    if program in PYTHONS:
        return _python
    if program.removeprefix("./") in BY_PROGRAM:
        return BY_PROGRAM[program.removeprefix("./")]
    if "/" not in program:
        raise UnknownProgramError(" ".join(words))
    if not script.is_file():
        raise WrongCommandError(f"{program}: no such file")
    if script.parts[0] == "tests":
        return programs.tests
    if script.name == "pretrain_gpt.py":
        return launching.training
    if script.suffix == ".py":
        return programs.script
    return launching.example if script.parent.name == "examples" else programs.shell


def _python(words: list[str]) -> list[str] | None:
    words = words[1:]
    while words[:1] == ["-W"]:
        words = words[2:]
    if words[:1] != ["-m"]:
        return ["./" + words[0].removeprefix("./"), *words[1:]]
    if words[1] not in BY_MODULE:
        raise UnknownProgramError(f"python -m {words[1]}")
    return BY_MODULE[words[1]](words[1:])


BY_PROGRAM: dict[str, Rule] = {
    "torchrun": launching.torchrun,
    "sbatch": launching.sbatch,
    "srun": launching.srun,
    "bash": launching.bash,
    "docker": launching.docker,
    "scripts/test.sh": programs.tests,
}
BY_MODULE: dict[str, Rule] = {
    "pytest": programs.tests,
    "megatron_hdp": programs.ours,
    "megatron_hdp.cpu.launch": launching.cpu_launch,
    "torch.distributed.run": launching.torchrun,
}
