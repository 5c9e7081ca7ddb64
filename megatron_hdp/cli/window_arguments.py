# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`--window` and `--window-layers`, of the commands that plan without a launch line."""

from __future__ import annotations

import argparse

from megatron_hdp.planning import PlanError
from megatron_hdp.planning.windows import NO_WINDOWS, Windows


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """The two arguments."""
    group.add_argument(
        "--window", type=int, help="sliding window: W of Megatron's --window-size W,0"
    )
    group.add_argument(
        "--window-layers", type=float, help="share of the layers that have it; default 1"
    )


def windows_of(args: argparse.Namespace) -> Windows:
    """The layers' windows.

    Raises:
        PlanError: a window below 0, a share outside (0, 1], or a share of no window.
    """
    share = 1.0 if args.window_layers is None else args.window_layers
    if args.window is None:
        if args.window_layers is not None:
            raise PlanError(f"--window-layers {share:g} has no window: give --window, too")
        return NO_WINDOWS
    if args.window < 0:
        raise PlanError(f"--window {args.window}: give at least 0, or leave it out")
    if not 0 < share <= 1:
        raise PlanError(f"--window-layers {share:g}: give a share above 0, at most 1")
    return Windows(args.window, share)
