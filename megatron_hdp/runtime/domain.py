# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The HDP domain: Megatron's own data-parallel-with-context-parallel group, as launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hdp.runtime.communicator import DomainCommunicators
from megatron_hdp.runtime.waiting import waiting


@dataclass(frozen=True)
class Domain:
    """The N = DP x CP ranks that share this rank's (TP, PP) coordinate."""

    global_ranks: tuple[int, ...]
    """Global rank of every HDP rank."""
    rank: int
    """This process's HDP rank."""
    communicators: DomainCommunicators
    """K/V and dK/dV communicators; rings are rank lists inside them."""
    all_domains: tuple[tuple[int, ...], ...]
    """Global ranks of every domain of the world, the same on all ranks."""

    @property
    def size(self) -> int:
        return len(self.global_ranks)


def create_domain(timeout: timedelta) -> Domain:
    """Makes this world's domains; called by every rank right after Megatron's own groups.

    Collective over the world: the communicators of all domains are made and warmed in one order.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mine = tuple(dist.get_process_group_ranks(group))
    domains = _all_domains(mine)
    communicators = DomainCommunicators.create(domains, timeout=timeout)
    return Domain(mine, mine.index(dist.get_rank()), communicators, domains)


def _all_domains(mine: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every domain of the world, sorted by first member; each rank contributes one integer."""
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else "cpu"
    first = torch.tensor([mine[0]], dtype=torch.int64, device=device)
    firsts = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    with waiting("all ranks to say which domain they are in"):
        dist.all_gather(firsts, first)
    domains: dict[int, list[int]] = {}
    for rank, value in enumerate(firsts):
        domains.setdefault(int(value), []).append(rank)
    found = tuple(tuple(domains[key]) for key in sorted(domains))
    if tuple(mine) not in found:
        raise RuntimeError(
            f"Megatron's data-parallel group {tuple(mine)} is not in ascending rank order, "
            f"which HDP does not support: use the default --use-tp-pp-dp-mapping setting."
        )
    return found


def _on_gpu() -> bool:
    return dist.get_backend() == "nccl"
