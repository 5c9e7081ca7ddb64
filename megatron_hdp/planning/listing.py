# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""From an ordered list of placements to slots: what the paper's strategies leave open.

A ring takes the first slot behind every member's last ring, so it has one slot on all of them. With
pipeline stages local packs take each rank's free slots from the lowest on; without, they follow the
rank's last ring, for a pack before a ring would keep the other members waiting. A slot that stays
free runs a zero-loss micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hdp.planning.builder import PlanBuilder
from megatron_hdp.planning.config import PlannerConfig, StepRequest
from megatron_hdp.planning.degrees import layers_per_rank
from megatron_hdp.planning.values import IntArray, Plan


class Listing:
    """Placements of one step, in the order in which a strategy makes them."""

    def __init__(self, config: PlannerConfig, request: StepRequest) -> None:
        self._config = config
        self._request = request
        self._rings: list[tuple[list[int], IntArray, float]] = []
        self._packs: list[list[tuple[IntArray, float]]] = [[] for _ in range(config.num_ranks)]
        self.counts = np.zeros(config.num_ranks, np.int64)
        """[N] micro-batches listed so far."""

    def add_ring(self, ranks: Sequence[int], sequences: IntArray, ratio: float = 0.0) -> None:
        """Sequences (positions in the request) on a ring; one rank alone takes them as a pack."""
        self.counts[list(ranks)] += 1
        if len(ranks) == 1:
            self._packs[ranks[0]].append((sequences, ratio))
        else:
            self._rings.append((sorted(ranks), sequences, ratio))

    def add_pack(self, rank: int, sequences: IntArray) -> None:
        """Whole sequences on one rank."""
        self.counts[rank] += 1
        self._packs[rank].append((sequences, 0.0))

    def build(self, strategy: str) -> Plan:
        """Gives everything its slot."""
        config, request = self._config, self._request
        builder = PlanBuilder(request.ids, request.lengths, config.num_ranks, config.capacity)
        taken: list[set[int]] = [set() for _ in range(config.num_ranks)]
        following = np.zeros(config.num_ranks, np.int64)
        ratios: dict[tuple[int, int], float] = {}
        for ranks, sequences, ratio in self._rings:
            slot = int(following[ranks].max())
            builder.add_ring(ranks, slot, sequences)
            following[ranks] = slot + 1
            for rank in ranks:
                taken[rank].add(slot)
                if ratio:
                    ratios[rank, slot] = ratio
        for rank, packs in enumerate(self._packs):
            slot = 0 if config.pipeline_depth > 1 else int(following[rank])
            for sequences, ratio in packs:
                while slot in taken[rank]:
                    slot += 1
                builder.add_local(rank, slot, sequences)
                if ratio:
                    ratios[rank, slot] = ratio
                slot += 1
        plan = builder.build(
            request.step, strategy, ratios, layers_per_rank(config), config.expert_ranks
        )
        return replace(plan, loss_share=config.loss_share, recomputed_share=config.recomputed_share)
