# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron runs make for its dataset helpers, which a wheel has compiled already."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron_hdp.cpu.faults.fault import Fault


def _needed() -> bool:
    from megatron.core.datasets import utils

    no_makefile = not Path(str(utils.__file__)).with_name("Makefile").exists()
    return (
        no_makefile and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    )


def _compiled_already() -> None:
    """The wheel brings helpers_cpp."""


def _handle() -> None:
    from megatron.core.datasets import utils

    utils.compile_helpers = _compiled_already


FAULT = Fault(
    symbol="megatron.core.datasets.utils:compile_helpers",
    seen="make: *** No targets; then exit code 1 before training",
    where="any machine with Megatron's wheel, GPUs too",
    needed=_needed,
    handle=_handle,
)
