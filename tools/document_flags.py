# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Writes docs/flags.md from the parsers themselves; a test compares the page with them.

python tools/document_flags.py
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from megatron_hdp.__main__ import COMMANDS
from megatron_hdp.runtime import options

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
_HEAD = """# Every flag

<!-- Written by tools/document_flags.py from the parsers: change a flag's help there, not here. -->

Megatron's own flags keep their meaning ([launching](launch.md)). A flag without a default is off,
or not set.
"""
_TRAINING = """
## Training

Beside `--hdp` on a Megatron launch line. `megatron_hdp.enable(capacity=8192, strategy="static")`
sets other defaults, by the flags' names without `--hdp-`.
"""


def page() -> str:
    """The whole page."""
    hdp = options.add_hdp_group(argparse.ArgumentParser(add_help=False), options.HdpOptions())
    parts = [_HEAD, _TRAINING, *_table(hdp._group_actions)]
    for name, summary in COMMANDS.items():
        sentence = f"{summary[:1].upper()}{summary[1:]}."
        parts += [f"\n## python -m megatron_hdp {name}\n\n{sentence}\n", *_command(name)]
    return "".join(parts)


def _command(name: str) -> Iterator[str]:
    """A command's flags, a table per group of its `--help`."""
    module = importlib.import_module(f"megatron_hdp.cli.{name}")
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    for group in parser._action_groups:
        if group._group_actions:
            if group.title != "options":
                yield f"\n### {name}: {group.title}\n"
            yield from _table(group._group_actions)


def _table(actions: list[argparse.Action]) -> Iterator[str]:
    yield "\n| flag | value | default | what |\n| --- | --- | --- | --- |\n"
    for action in actions:
        what = (action.help or "").replace("|", "\\|")
        cells = (f"`{action.option_strings[0]}`", _value(action), _default(action), what)
        yield f"| {' | '.join(cells)} |\n"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return getattr(action.type, "__name__", "text") if action.type else "text"


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    return "" if action.default is None or action.default is False else f"`{action.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
