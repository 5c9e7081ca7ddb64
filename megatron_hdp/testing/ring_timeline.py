# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""When each rank of a real ring computed, sent, received and waited, and how much of it overlapped.

On gloo a work says that it is complete only to whoever waits for it, and only one may wait. So
threads of their own wait here, and the ring's waits become waits for these threads: what they wait
for is the same, one wake-up later. All times are seconds of the machine's monotonic clock, which
the processes of one machine share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.runtime.communicator import Channel, DomainCommunicators, Transfer, TransferLabel

_SWITCH_S = 1e-4
_WORKS_AT_ONCE = 4
"""A send and a receive on each of the two channels."""


class Span(NamedTuple):
    """Begin and end, in seconds."""

    begin: float
    end: float


class Hop(NamedTuple):
    """Names one exchange of a ring on every member alike."""

    phase: str
    channel: Channel
    number: int


@dataclass
class Exchange:
    """One rank's part in a hop."""

    hop: Hop
    source: int
    """HDP rank that the receive is from."""
    to: int
    """HDP rank that the send is to."""
    posting: Span
    """The call that hands it to gloo, which may already write to the socket."""
    arrived: float = 0.0
    """When the receive was complete."""
    waits: list[Span] = field(default_factory=list)
    """The ring's waits for the send and for the receive."""


@dataclass
class Timeline:
    """What one rank did."""

    blocks: dict[str, list[Span]] = field(default_factory=dict)
    """Calls of the kernel, by phase: forward, backward."""
    exchanges: dict[Hop, Exchange] = field(default_factory=dict)
    whole: Span = field(default_factory=lambda: Span(0.0, 0.0))
    """Both passes."""


class Reception(NamedTuple):
    """How one hop's K/V or dK/dV reached one rank, in seconds."""

    rank: int
    hop: Hop
    transfer: Span
    """From when sender and receiver had both posted it until it was there."""
    in_blocks: float
    """The part of the transfer in which the receiver's kernel computed."""
    in_posting: float
    """The part in which the receiver was busy posting it or another one."""
    in_waits: float
    """The part in which the receiver waited for it or another one."""
    waited: float
    """How long the ring stood in its waits for this hop."""
    late: float
    """The part of that in which a neighbour had not come to this hop yet."""


class TimedCpuFlash(CpuFlash):
    """Writes down when it computes."""

    def __init__(self, timeline: Timeline) -> None:
        self._blocks = timeline.blocks

    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.monotonic()
        result = super().forward(*args)
        self._blocks.setdefault("forward", []).append(Span(begin, time.monotonic()))
        return result

    def backward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        begin = time.monotonic()
        result = super().backward(*args)
        self._blocks.setdefault("backward", []).append(Span(begin, time.monotonic()))
        return result


class _WatchedWork:
    """In the place of a work that another thread waits for."""

    def __init__(self, completed: Future[float], exchange: Exchange, receives: bool) -> None:
        self._completed = completed
        self._exchange = exchange
        self._receives = receives

    def wait(self) -> None:
        begin = time.monotonic()
        completed = self._completed.result()  # ends with gloo's own timeout
        self._exchange.waits.append(Span(begin, time.monotonic()))
        if self._receives:
            self._exchange.arrived = completed


@dataclass
class TimedCommunicators(DomainCommunicators):
    """gloo communicators that write down their transfers; for one micro-batch at a time."""

    timeline: Timeline = field(default_factory=Timeline)
    blocking: bool = False
    """Wait for each transfer where it is posted: what a ring without overlap would do."""
    watchers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_WORKS_AT_ONCE))

    def __post_init__(self) -> None:
        # A watcher's note of the time must not wait for five milliseconds of Python elsewhere.
        sys.setswitchinterval(_SWITCH_S)

    def exchange(
        self,
        channel: Channel,
        sent: torch.Tensor,
        received: torch.Tensor,
        *,
        to: int,
        source: int,
        label: TransferLabel,
    ) -> Transfer[torch.Tensor]:
        hop = Hop(label.phase, channel, label.ring_step)
        begin = time.monotonic()
        transfer = super().exchange(channel, sent, received, to=to, source=source, label=label)
        exchange = Exchange(hop, source, to, Span(begin, time.monotonic()))
        assert len(transfer.works) == 2, "on gloo, a send and a receive, neither of them empty"
        self.timeline.exchanges[hop] = exchange
        watched: Any = [
            _WatchedWork(self.watchers.submit(_completed, work), exchange, receives)
            for work, receives in zip(transfer.works, (False, True), strict=True)
        ]
        transfer.works = watched
        if self.blocking:
            transfer.wait()
        return transfer


def _completed(work: dist.Work) -> float:
    work.wait()
    return time.monotonic()


def receptions(timelines: Sequence[Timeline]) -> list[Reception]:
    """Every hop of every rank, from the timelines of all ranks, in rank order."""
    found = []
    for rank, timeline in enumerate(timelines):
        blocks = [span for spans in timeline.blocks.values() for span in spans]
        exchanges = timeline.exchanges.values()
        postings = [exchange.posting for exchange in exchanges]
        waits = [wait for exchange in exchanges for wait in exchange.waits]
        for hop, exchange in timeline.exchanges.items():
            sent, taken = (
                timelines[neighbour].exchanges[hop].posting.begin
                for neighbour in (exchange.source, exchange.to)
            )
            transfer = Span(max(exchange.posting.begin, sent), exchange.arrived)
            found.append(
                Reception(
                    rank=rank,
                    hop=hop,
                    transfer=transfer,
                    in_blocks=overlap(transfer, blocks),
                    in_posting=overlap(transfer, postings),
                    in_waits=overlap(transfer, waits),
                    waited=sum(wait.end - wait.begin for wait in exchange.waits),
                    late=overlap(Span(float("-inf"), max(sent, taken)), exchange.waits),
                )
            )
    return found


def overlap(span: Span, others: Iterable[Span]) -> float:
    """Seconds of a span that lie in others, which do not overlap among themselves."""
    return sum(
        max(0.0, min(span.end, other.end) - max(span.begin, other.begin)) for other in others
    )


def shares(found: Iterable[Reception]) -> dict[str, float]:
    """What the receivers did meanwhile, as shares of all transfers' time; the rest is other work.

    Keys: in_blocks, in_posting, in_waits.
    """
    found = list(found)
    moving = sum(one.transfer.end - one.transfer.begin for one in found)
    names = ("in_blocks", "in_posting", "in_waits")
    return {name: sum(getattr(one, name) for one in found) / moving for name in names}
