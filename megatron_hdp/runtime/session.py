# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What lives as long as the program: options, the domain, the last step's record.

Nothing about a micro-batch is here (that travels in PackedSeqParams).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from megatron_hdp.planning.values import Plan
from megatron_hdp.runtime.domain import Domain
from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.records import StepRecord
from megatron_hdp.runtime.ring_groups import RingGroups
from megatron_hdp.runtime.step import HdpDataIterator

Streams = tuple[HdpDataIterator | None, HdpDataIterator | None, HdpDataIterator | None]

if TYPE_CHECKING:
    from megatron_hdp.data.remote.cluster import Cluster


@dataclass
class Session:
    """One program's HDP state, from `enable()` to `disable()`."""

    options: HdpOptions
    domain: Domain | None = None
    ring_groups: RingGroups | None = None
    """Made with the first step that needs process groups (Transformer Engine's attention)."""
    last_plan: Plan | None = None
    """The newest training step's plan, for the log line."""
    last_record: StepRecord | None = None
    """The newest training step's record on this rank."""
    offload: ActivationOffload | None = None
    """Made when the first micro-batch offloads."""
    loader_cluster: Cluster | None = None
    """The Ray actors that load, with --hdp-loader ray."""
    streams: Streams | None = None
    """Train, valid and test, for the model chunks of interleaved pipeline stages to share."""
    log_step: Callable[[Session, int, bool], None] | None = None
    """Called after Megatron's log function, with the iteration and whether it is the first."""

    def require_domain(self) -> Domain:
        if self.domain is None:
            raise RuntimeError(
                "HDP has no domain yet: call megatron_hdp.enable() before Megatron's "
                "initialize_model_parallel."
            )
        return self.domain

    def require_ring_groups(self) -> RingGroups:
        if self.ring_groups is None:
            self.ring_groups = RingGroups(
                self.require_domain().all_domains,
                budget=self.options.te_groups,
                timeout=timedelta(minutes=self.options.timeout_minutes),
            )
        return self.ring_groups

    def activation_offload(self, device: torch.device) -> ActivationOffload:
        """This rank's offload engine, within the host memory that the options allow."""
        if self.offload is None:
            host_bytes = int(self.options.host_memory * 2**30)
            self.offload = ActivationOffload(host_bytes, device=device)
        return self.offload


_session: Session | None = None


def start(options: HdpOptions) -> Session:
    """Begins a session, or updates the running one's options."""
    global _session
    if _session is None:
        _session = Session(options)
    else:
        _session.options = options
    return _session


def stop() -> None:
    """Ends the session."""
    global _session
    _session = None


def current_session() -> Session:
    """The running session.

    Raises:
        RuntimeError: HDP is not enabled.
    """
    if _session is None:
        raise RuntimeError("HDP is not enabled: call megatron_hdp.enable() first.")
    return _session
