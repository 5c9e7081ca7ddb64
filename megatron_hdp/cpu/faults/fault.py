# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a handled fault of Megatron is: where, what is seen, when, and the handling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One upstream fault. None of them is about HDP; all show in stock Megatron."""

    symbol: str
    """`module:attribute` of megatron-core 0.19.2 whose behaviour is put right."""
    seen: str
    """What a user would see without the handling."""
    where: str
    """The machines that have it, in words."""
    needed: Callable[[], bool]
    """Whether this process has it; may import the module of `symbol`."""
    handle: Callable[[], None]
    """Puts it right for the life of the process."""
    cpu_mode_only: bool = False
    """Whether the handling gives up something that a GPU run may use."""
