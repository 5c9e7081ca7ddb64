# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Faults of megatron-core 0.19.2 that a machine without Transformer Engine and Apex runs into.

One module per upstream module. CPU mode handles all that are needed; without CPU mode (a GPU with
Megatron's wheel but no TE) a script may call `handle_needed()` itself, once Megatron imports.
"""

from __future__ import annotations

from megatron_hdp.cpu.faults import (
    compile_helpers,
    moe_splits,
    rerun_mode,
    torch_adam,
    torch_norm,
    triton_import,
    uneven_collectives,
    write_errors,
    write_queue,
)
from megatron_hdp.cpu.faults.fault import Fault

FAULTS = (
    triton_import.FAULT,
    compile_helpers.FAULT,
    write_queue.FAULT,
    write_errors.FAULT,
    torch_adam.EMPTY_STATE,
    torch_adam.LEAF_VIEWS,
    torch_adam.SHARED_STEP,
    torch_norm.FAULT,
    rerun_mode.FAULT,
    moe_splits.FAULT,
    uneven_collectives.FAULT,
)
_handled: list[Fault] = []


def handle_needed(*, cpu_mode: bool = False) -> tuple[Fault, ...]:
    """Handles every fault that this process has; imports Megatron. Idempotent.

    Args:
        cpu_mode: also those whose handling is right in CPU mode only.

    Returns:
        What has been handled in this process so far, in order.
    """
    for fault in FAULTS:
        if fault in _handled or (fault.cpu_mode_only and not cpu_mode):
            continue
        if fault.needed():
            fault.handle()
            _handled.append(fault)
    return tuple(_handled)


__all__ = ["FAULTS", "Fault", "handle_needed"]
