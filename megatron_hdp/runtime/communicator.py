# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The domain's two long-lived communicators: K/V one way, dK/dV the other.

Rings are rank lists inside them (ByteScale, section 5.1): no group is made in a step, and any set
of ranks, in any order, is a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_hdp.runtime.waiting import waiting

Channel = Literal["kv", "dkv"]


_PHASES = ("forward", "backward", "router", "heads forward", "heads backward")


class TransferLabel(NamedTuple):
    """Says which transfer this is, for messages and, on gloo, for matching."""

    step: int
    slot: int
    layer: int
    phase: str
    """One of forward, backward, router, heads forward, heads backward."""
    ring_step: int
    ring: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"step {self.step}, slot {self.slot}, layer {self.layer}, {self.phase}, ring "
            f"{self.ring}, ring step {self.ring_step}"
        )

    @property
    def tag(self) -> int:
        """A gloo tag: a transfer of a wrong plan then times out instead of pairing wrongly."""
        phase = _PHASES.index(self.phase)
        return (
            ((self.slot % 1024) * 512 + self.layer % 512) * len(_PHASES) + phase
        ) * 256 + self.ring_step % 256


class Transfer[Received]:
    """Sends and receives under way together."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        label: TransferLabel,
        awaited: Sequence[str],
        received: Received,
        sent: object,
    ) -> None:
        self.works = works
        """The send, then the receive, of those that there are."""
        self._label = label
        # One clause per work; a backend that joins both in one work waits for both.
        self._awaited = awaited if len(awaited) == len(works) else [" and ".join(awaited)]
        self._received = received
        self._sent = sent  # gloo reads it until the send completes

    def wait(self) -> Received:
        """What was received, when it is there (on CUDA: ordered on the current stream).

        Raises:
            RuntimeError: a peer did not come within the timeout, or the connection broke.
        """
        for work, peer in zip(self.works, self._awaited, strict=True):
            with waiting(f"{peer}, in {self._label}"):
                work.wait()
        return self._received


Peers = Sequence[tuple[int, torch.Tensor]]
"""HDP ranks, each with a contiguous buffer of its own."""


@dataclass
class DomainCommunicators:
    """Both communicators of this rank's domain, and how much went through them."""

    global_ranks: tuple[int, ...]
    """Global rank of every HDP rank."""
    groups: dict[Channel, dist.ProcessGroup]
    """Empty in a domain of one rank."""
    bytes_sent: int = field(default=0)

    @classmethod
    def create(cls, domains: Sequence[Sequence[int]], *, timeout: timedelta) -> DomainCommunicators:
        """Makes and warms the communicators of all domains; collective over the world.

        Args:
            domains: every domain's global ranks, the same list on all ranks.
            timeout: how long a transfer may wait for its peer.
        """
        me = dist.get_rank()
        mine: DomainCommunicators | None = None
        for ranks in domains:
            groups: dict[Channel, dist.ProcessGroup] = {}
            if len(ranks) > 1:
                channels: tuple[Channel, Channel] = ("kv", "dkv")
                for channel in channels:
                    with waiting(f"ranks {list(ranks)} to set up the ring communicator {channel}"):
                        group = dist.new_group(
                            list(ranks), timeout=timeout, group_desc=f"hdp_{channel}"
                        )
                        if me in ranks:
                            # Lazy creation would otherwise happen at the memory peak of a step.
                            dist.barrier(group)
                            groups[channel] = group
            if me in ranks:
                mine = cls(tuple(ranks), groups)
        if mine is None:
            raise RuntimeError(f"rank {me} is in none of the HDP domains {list(domains)}")
        return mine

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
        """Sends one contiguous buffer to HDP rank `to` while one comes from HDP rank `source`.

        Empty buffers are not sent; both sides know the sizes from the plan.
        """
        works, awaited = self._post(channel, [(to, sent)], [(source, received)], label)
        return Transfer(works, label, awaited, received, sent)

    def exchange_all(
        self,
        channel: Channel,
        sent: Peers,
        received: Peers,
        *,
        label: TransferLabel,
    ) -> Transfer[Peers]:
        """The same with several HDP ranks at once: one buffer to each, one from each."""
        works, awaited = self._post(channel, sent, received, label)
        return Transfer(works, label, awaited, received, sent)

    def _post(
        self, channel: Channel, sent: Peers, received: Peers, label: TransferLabel
    ) -> tuple[Sequence[dist.Work], list[str]]:
        """The works under way, and a clause of what each waits for."""
        group = self.groups[channel]
        ops, awaited = [], []
        tag = label.tag if dist.get_backend(group) == "gloo" else 0
        for to, buffer in sent:
            if buffer.numel():
                ops.append(dist.P2POp(dist.isend, buffer, self.global_ranks[to], group, tag))
                awaited.append(f"HDP rank {to} (rank {self.global_ranks[to]}) to receive")
                self.bytes_sent += buffer.numel() * buffer.element_size()
        for source, buffer in received:
            if buffer.numel():
                ops.append(dist.P2POp(dist.irecv, buffer, self.global_ranks[source], group, tag))
                awaited.append(f"HDP rank {source} (rank {self.global_ranks[source]}) to send")
        if not ops:
            return [], []
        with waiting(f"{' and '.join(awaited)}, in {label}"):
            return dist.batch_isend_irecv(ops), awaited
