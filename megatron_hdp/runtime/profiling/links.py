# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Copies to the host and transfers between ranks, all ranks at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megatron_hdp.planning.fit import fit
from megatron_hdp.runtime.communicator import DomainCommunicators, TransferLabel
from megatron_hdp.runtime.domain import Domain
from megatron_hdp.runtime.offload.transport import Copies, Event, transport_for
from megatron_hdp.runtime.profiling.clock import Clock

_COPIED_BYTES = 1 << 26
_HOP_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)


@dataclass(frozen=True)
class Link:
    """A message's cost, as seen by a rank that sends one and receives one."""

    latency_s: float
    bytes_s: float
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds) as measured."""
    worst_error: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def host_copies(clock: Clock, repeats: int) -> dict[str, float]:
    """Bytes per second `to_host` and `to_device`, by the offload engine's own transport.

    All ranks copy at once, since they share the host's memory and its links.
    """
    transport = transport_for(clock.device)
    device = transport.device_buffer(_COPIED_BYTES)
    device.zero_()
    slabs = [transport.host_slab(transport.slab_bytes) for _ in
             range(_COPIED_BYTES // transport.slab_bytes or 1)]  # fmt: skip
    size = min(_COPIED_BYTES, transport.slab_bytes)
    parts = device.split(size)
    there: Copies = [(part, slab[: len(part)]) for part, slab in zip(parts, slabs, strict=False)]
    back: Copies = [(slab, part) for part, slab in there]

    def timed(copy: Callable[[Copies, list[Event]], Event], copies: Copies) -> float:
        def work() -> None:
            transport.wait(copy(copies, [transport.now()]))

        return _COPIED_BYTES / clock.seconds(work, repeats)

    return {"to_host": timed(transport.to_host, there),
            "to_device": timed(transport.to_device, back)}  # fmt: skip


def links(clock: Clock, domain: Domain, repeats: int) -> dict[str, Link]:
    """`inside` a node and, with several, `across`: each rank sends to the next, all at once.

    With one rank there is none; with one rank a node there is no `inside`.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    node = [rank // local for rank in domain.global_ranks]
    mine = [r for r in range(domain.size) if node[r] == node[domain.rank]]
    found = {}
    if len(mine) > 1:
        at = mine.index(domain.rank)
        peers = mine[(at + 1) % len(mine)], mine[at - 1]
        found["inside"] = _link(clock, domain.communicators, *peers, repeats)
    if len(set(node)) > 1:
        step, size = len(mine), domain.size
        peers = (domain.rank + step) % size, (domain.rank - step) % size
        found["across"] = _link(clock, domain.communicators, *peers, repeats)
    return found


def _link(clock: Clock, communicators: DomainCommunicators, to: int, source: int,
          repeats: int) -> Link:  # fmt: skip
    points = []
    for index, size in enumerate(_HOP_BYTES):
        sent = torch.zeros(size, dtype=torch.uint8, device=clock.device)
        received = torch.empty_like(sent)
        label = TransferLabel(0, 0, 0, "forward", index, (source, to))
        work = functools.partial(_exchange, communicators, sent, received, to, source, label)
        points.append((size, clock.seconds(work, 3 * repeats)))
    columns = [1.0] * len(points), [float(size) for size, _ in points]
    found = fit(columns, [taken for _, taken in points])
    latency, per_byte = found.coefficients
    return Link(latency, 1 / max(per_byte, 1e-15), tuple(points), found.worst_error)


def _exchange(
    communicators: DomainCommunicators, sent: torch.Tensor, received: torch.Tensor, to: int,
    source: int, label: TransferLabel,
) -> None:  # fmt: skip
    communicators.exchange("kv", sent, received, to=to, source=source, label=label).wait()
