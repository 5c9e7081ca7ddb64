# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""How saved bytes travel between device and host: two directions, ordered by events.

The engine speaks to this interface alone, so that it is the same on a GPU and on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

Event = Any
"""A point in a stream's order; what it is, only its transport knows."""
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of uint8 tensors of equal length."""


class Transport(Protocol):
    """Copies in stream order. "Compute" is the stream on which the model runs."""

    slab_bytes: int
    """Size of a slab of host memory."""
    min_bytes: int
    """Tensors below are not worth a copy of their own."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives on this transport's device."""
        ...

    def host_slab(self, num_bytes: int) -> torch.Tensor:
        """New host memory, uint8 [num_bytes], fit for asynchronous copies."""
        ...

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """New device memory, uint8 [num_bytes], allocated in compute's order."""
        ...

    def now(self) -> Event:
        """Happens when compute has done everything that was enqueued so far."""
        ...

    def to_host(self, copies: Copies, after: Iterable[Event]) -> Event:
        """Copies to the host once `after` has happened; the result happens when they are done."""
        ...

    def to_device(self, copies: Copies, after: Iterable[Event]) -> Event:
        """Copies to the device once `after` has happened; a stream of its own."""
        ...

    def wait(self, event: Event) -> None:
        """Compute goes on only after `event`; the host does not wait."""
        ...

    def happened(self, event: Event) -> bool:
        """Whether `event` is known to have happened; never waits."""
        ...


class HostTransport:
    """Device and host are the same memory: a copy is done when its call returns."""

    slab_bytes = 1 << 22
    min_bytes = 1

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def host_slab(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def now(self) -> Event:
        return None

    def to_host(self, copies: Copies, after: Iterable[Event]) -> Event:
        for source, target in copies:
            target.copy_(source)

    def to_device(self, copies: Copies, after: Iterable[Event]) -> Event:
        self.to_host(copies, after)

    def wait(self, event: Event) -> None: ...

    def happened(self, event: Event) -> bool:
        return True


class CudaTransport:
    """Pinned memory and two copy streams beside the current one. No GPU has run this yet."""

    slab_bytes = 1 << 28
    min_bytes = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def host_slab(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def now(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def to_host(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._copy(self._out, copies, after)

    def to_device(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._copy(self._back, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Copies, after: Iterable[Event]) -> Event:
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def happened(self, event: Event) -> bool:
        return bool(event.query())


def transport_for(device: torch.device) -> Transport:
    """The transport of a device; a CUDA device must have an index."""
    return CudaTransport(device) if device.type == "cuda" else HostTransport()
