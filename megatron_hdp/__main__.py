# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_hdp COMMAND`: one module of `megatron_hdp.cli` per command."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": "what of Megatron is patched, where, and whether it fits the installed versions",
    "profile": "measure a launch line's model on this machine, for --hdp-profile",
    "plan": "plan steps for a lengths file and show what HDP would do with it",
    "simulate": "simulate steps of a model on a described cluster: what HDP would give",
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; imports only that command's module. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hdp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    passes_on = False
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if argv[:1] == [name]:
            module = importlib.import_module(f"megatron_hdp.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
            passes_on = getattr(module, "PASSES_ON", False)
    args, rest = parser.parse_known_args(argv)
    if rest and not passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
