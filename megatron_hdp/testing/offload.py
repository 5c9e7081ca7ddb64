# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A transport that is as late as its events allow, to show a missing wait on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from megatron_hdp.runtime.offload.transport import Copies, HostTransport


class _Stream:
    """Work in order, done only when someone waits for it."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.done = 0
        self.enqueued = 0

    def enqueue(self, work: Callable[[], None]) -> LateEvent:
        self.work.append(work)
        self.enqueued += 1
        return LateEvent(self, self.enqueued)


class LateEvent:
    """Happens when waited for, with everything before it on its stream."""

    def __init__(self, stream: _Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    @property
    def happened(self) -> bool:
        """Whether anyone had to wait for it, or for something behind it."""
        return self._stream.done >= self._number

    def happen(self) -> None:
        """Does the stream's work up to this point."""
        while not self.happened:
            self._stream.work.popleft()()
            self._stream.done += 1


class LateTransport(HostTransport):
    """Copies run when somebody waits for them, and not a moment before; new memory holds NaNs.

    So a reader that does not wait reads NaNs, and a writer that does not wait destroys what a
    pending copy has still to read, each time.
    """

    slab_bytes = 1 << 16

    def __init__(self) -> None:
        self._now = _Stream()
        self._out, self._back = _Stream(), _Stream()

    def host_slab(self, num_bytes: int) -> torch.Tensor:
        return super().host_slab(num_bytes).fill_(255)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return super().device_buffer(num_bytes).fill_(255)

    def now(self) -> LateEvent:
        return LateEvent(self._now, 0)

    def to_host(self, copies: Copies, after: Iterable[LateEvent]) -> LateEvent:
        return self._late(self._out, copies, tuple(after))

    def to_device(self, copies: Copies, after: Iterable[LateEvent]) -> LateEvent:
        return self._late(self._back, copies, tuple(after))

    def _late(self, stream: _Stream, copies: Copies, after: tuple[LateEvent, ...]) -> LateEvent:
        def work() -> None:
            for event in after:
                event.happen()
            for source, target in copies:
                target.copy_(source)

        return stream.enqueue(work)

    def wait(self, event: LateEvent) -> None:
        event.happen()

    def happened(self, event: LateEvent) -> bool:
        return event.happened
