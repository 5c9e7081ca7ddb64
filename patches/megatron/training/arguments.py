# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Patches megatron.training.arguments: the `hdp` argument group and the early refusals."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megatron_hdp.patches.registry import Patch


def _wrap_parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.options import HdpOptions, add_hdp_arguments
    from megatron_hdp.runtime.validation import prepare_arguments

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Any = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_hdp_arguments(parser, session.current_session().options)

        args = original(provider, ignore_unknown_args)
        prepare_arguments(args)
        session.start(HdpOptions.from_args(args))
        return args

    return parse_args


PATCHES = (
    Patch(
        target="megatron.training.arguments:parse_args",
        reason="A script that knows nothing of HDP passes no extra_args_provider, and refusals "
        "must come before validate_args and any process group.",
        parameters=("extra_args_provider", "ignore_unknown_args"),
        wrap=_wrap_parse_args,
    ),
)
