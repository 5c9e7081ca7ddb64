# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Counts of saved activation bytes: what lies on the device, and what moved."""

from __future__ import annotations

from dataclasses import dataclass


class Account:
    """Saved activation bytes on the device now, and at most; adds to its parent as well."""

    def __init__(self, parent: Account | None = None) -> None:
        self.device_bytes = 0
        self.device_peak = 0
        self._parent = parent

    def add(self, num_bytes: int) -> None:
        """Counts bytes that came to the device, or, negative, that left it."""
        self.device_bytes += num_bytes
        self.device_peak = max(self.device_peak, self.device_bytes)
        if self._parent is not None:
            self._parent.add(num_bytes)


@dataclass(frozen=True)
class LayerCount:
    """One layer of one micro-batch."""

    saved_bytes: int
    """What the layer saved for backward and the engine may move; parameters, kept, marked and tiny
    tensors are not in it."""
    offloaded_bytes: int
    """What went to the host."""
    refused_bytes: int
    """What should have gone, but the host memory's limit was reached."""


@dataclass
class Totals:
    """Sums over everything that an engine has done."""

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    refused_bytes: int = 0

    def count(self, layer: LayerCount) -> None:
        """Adds a layer."""
        self.saved_bytes += layer.saved_bytes
        self.offloaded_bytes += layer.offloaded_bytes
        self.refused_bytes += layer.refused_bytes
