# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Makes `--help` work where an argument's help text is no valid format string."""

from __future__ import annotations

import argparse


def repair_help(parser: argparse.ArgumentParser) -> list[str]:
    """Escapes the per cent signs of help texts that argparse cannot format.

    megatron-core 0.19.2 has a bare "(10%)", on which `--help` ends in a ValueError.

    Returns:
        The arguments whose text was repaired.
    """
    formatter = parser._get_formatter()
    repaired = []
    for action in parser._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")
            repaired.append(action.option_strings[0] if action.option_strings else action.dest)
    return repaired
