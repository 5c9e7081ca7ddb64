# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Asks a program's own parser about arguments, and ends before the program does anything."""

from __future__ import annotations

import argparse
from collections.abc import Callable


class _Parsed(BaseException):
    """No Exception: a program's own handlers must not see it."""


def first_parse(program: Callable[[], object]) -> tuple[argparse.Namespace, list[str]]:
    """(arguments, those left over) of the first parser that `program()` asks, where it ends."""
    parse_args, parse_known = (
        argparse.ArgumentParser.parse_args,
        argparse.ArgumentParser.parse_known_args,
    )

    def known(parser: argparse.ArgumentParser, args: object = None, space: object = None) -> None:
        argparse.ArgumentParser.parse_known_args = parse_known  # subparsers ask it too
        raise _Parsed(*parse_known(parser, args, space))

    def every(parser: argparse.ArgumentParser, args: object = None, space: object = None) -> None:
        argparse.ArgumentParser.parse_known_args = parse_known
        raise _Parsed(parse_args(parser, args, space), [])

    argparse.ArgumentParser.parse_args = every
    argparse.ArgumentParser.parse_known_args = known
    try:
        program()
    except _Parsed as parsed:
        return parsed.args
    finally:
        argparse.ArgumentParser.parse_args = parse_args
        argparse.ArgumentParser.parse_known_args = parse_known
    raise AssertionError("the program ended without a look at its arguments")
