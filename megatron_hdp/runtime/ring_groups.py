# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A process group per ring, for attention that knows its peers by a group (Transformer Engine).

Groups are made by all ranks of the world together, before a step's first forward, in the order of
the step's plan, which all ranks have compared by then; nothing is made inside a step. HDP's own
ring needs none of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hdp.planning.values import Plan

Ranks = tuple[int, ...]


class RingGroupsError(RuntimeError):
    """A step needs more groups than there may be, or a rank did not come to make one."""


class RingGroups:
    """This rank's groups by ring, least recently used first.

    Args:
        domains: every domain's global ranks, the same list on all ranks.
        budget: how many rings may have a group at a time, in each domain.
        timeout: how long making a group, or a transfer in it, may wait for a peer.
    """

    def __init__(
        self, domains: Sequence[Sequence[int]], *, budget: int, timeout: timedelta
    ) -> None:
        self._domains = [tuple(domain) for domain in domains]
        self._budget = budget
        self._timeout = timeout
        self._groups: OrderedDict[Ranks, dist.ProcessGroup | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def prepare(self, plan: Plan, name: str) -> None:
        """Has a group for every ring of the plan; collective over the world where one is missing.

        Args:
            name: whose plan it is, for messages ("step 7 of train").

        Raises:
            RingGroupsError: on all ranks alike, when the plan has more rings than the budget; or a
                rank did not come within the timeout.
        """
        wanted = list(dict.fromkeys(_key(plan.ring(i).ranks) for i in range(plan.num_rings)))
        if len(wanted) > self._budget:
            raise RingGroupsError(
                f"{name} has {len(wanted)} different rings, but --hdp-te-groups {self._budget} "
                f"allows fewer process groups: raise it, or use --hdp-attention auto, which needs "
                f"none."
            )
        missing = [ring for ring in wanted if ring not in self._groups]
        self._evict(len(missing), keep=set(wanted))
        for ring in missing:
            self._groups[ring] = self._make(ring, name)
        for ring in wanted:
            self._groups.move_to_end(ring)

    def group(self, ring: Sequence[int]) -> dist.ProcessGroup:
        """The group of a ring that this rank is in, after `prepare`; its ranks are ascending."""
        group = self._groups[_key(ring)]
        assert group is not None
        return group

    def _evict(self, coming: int, keep: set[Ranks]) -> None:
        surplus = len(self._groups) + coming - self._budget
        if surplus <= 0:
            return
        unused = [ring for ring in self._groups if ring not in keep][:surplus]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the last step's transfers may still be queued
        for ring in unused:
            group = self._groups.pop(ring)
            if group is not None:
                dist.destroy_process_group(group)

    def _make(self, ring: Ranks, name: str) -> dist.ProcessGroup | None:
        """The ring's group in every domain; this rank's own one, or None."""
        me, mine = dist.get_rank(), None
        for domain in self._domains:
            ranks = [domain[rank] for rank in ring]
            try:
                group = dist.new_group(ranks, timeout=self._timeout, group_desc="hdp_te_ring")
                if me in ranks:
                    # Lazy creation would otherwise happen at the memory peak of a step.
                    dist.barrier(group)
                    mine = group
            except RuntimeError as error:
                raise RingGroupsError(
                    f"HDP waited {self._timeout} for all ranks to make the group of ring {ring} "
                    f"(global ranks {ranks}) for {name}; at least one never came: {error}"
                ) from error
        return mine


def _key(ring: Sequence[int]) -> Ranks:
    """torch.distributed sorts a group's ranks, so rings that differ in order share a group."""
    return tuple(sorted(ring))
