# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What of Megatron is patched: one module per upstream module touched, mirroring its tree.

`patch_table()` is the whole list; `seams.py` lists the official seams used beside it.
"""

from __future__ import annotations

from megatron_hdp.patches.registry import Applied, Patch, PatchError, apply, check, undo

_applied: list[Applied] = []


def patch_table() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied. Imports no Megatron module."""
    from megatron_hdp.patches.megatron.core import parallel_state, utils
    from megatron_hdp.patches.megatron.core.models.gpt import gpt_model
    from megatron_hdp.patches.megatron.training import arguments, training

    return (
        *arguments.PATCHES,
        *parallel_state.PATCHES,
        *gpt_model.PATCHES,
        *utils.PATCHES,
        *training.PATCHES,
    )


def apply_all() -> None:
    """Applies every patch or none. Does nothing when they are already in force.

    Raises:
        PatchError: a target is missing or has another signature than the one tested.
    """
    if _applied:
        return
    table = patch_table()
    check(table)
    try:
        for patch in table:
            _applied.append(apply(patch))
    except BaseException:
        undo_all()
        raise


def undo_all() -> None:
    """Restores every patched symbol to the very object that stood there before."""
    while _applied:
        undo(_applied.pop())


def is_applied(patch: Patch) -> bool:
    """Whether `patch` is in force."""
    return any(applied.patch.target == patch.target for applied in _applied)


__all__ = ["Patch", "PatchError", "apply_all", "is_applied", "patch_table", "undo_all"]
