# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""megatron.core needs triton, undeclared, for one module that dense models never use."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

from megatron_hdp.cpu.faults.fault import Fault

_MODULE = "megatron.core.transformer.moe.ops.paged_stash"


def _needed() -> bool:
    return importlib.util.find_spec("triton") is None and _MODULE not in sys.modules


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("--moe-paged-stash needs triton: pip install triton, or leave it out.")


def _handle() -> None:
    module = types.ModuleType(_MODULE)
    module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    module.paged_stash_copy_kernel = _refuse  # type: ignore[attr-defined]
    module.paged_stash_pop_kernel = _refuse  # type: ignore[attr-defined]
    sys.modules[_MODULE] = module


FAULT = Fault(
    symbol=_MODULE,
    seen="ModuleNotFoundError: triton, at import megatron.core",
    where="without triton (a CPU-only torch)",
    needed=_needed,
    handle=_handle,
)
