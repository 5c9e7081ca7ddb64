# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Proof that no wait cycle exists: walks every rank's forwards and backwards to the end.

Each stage of each rank has a fixed list of operations (1F1B). An operation of a ring runs when it
is the next one of every member. If the walk stops before the lists end, what is left waits in a
cycle. Unlike the rules of `validation.py` it takes slots as they are, so it also judges ring
entries that differ from member to member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Entry = tuple[int, ...] | None
"""The ring that a micro-batch enters (its ranks), None for a local one."""


def schedule(stage: int, depth: int, count: int) -> list[tuple[str, int]]:
    """1F1B operations of one stage: ("F" or "B", micro-batch), in order."""
    warm_up = min(depth - stage - 1, count)
    operations = [("F", k) for k in range(warm_up)]
    for i in range(count - warm_up):
        operations += [("F", warm_up + i), ("B", i)]
    return operations + [("B", i) for i in range(count - warm_up, count)]


def find_deadlock(entries: Mapping[int, Sequence[Entry]], depth: int) -> str | None:
    """A sentence naming who waits for whom, or None when everything ends.

    Args:
        entries: per rank, the ring that each of its micro-batches enters; a ring's k-th entry on
            one member meets its k-th entry on the others.
        depth: pipeline stages; every stage of a rank runs the same micro-batches.
    """
    walk = _Walk(entries, depth)
    return walk.run()


class _Walk:
    """Runs operations as long as any can."""

    def __init__(self, entries: Mapping[int, Sequence[Entry]], depth: int) -> None:
        self.depth = depth
        self.entries = entries
        self.lists = {
            (rank, stage): schedule(stage, depth, len(micro_batches))
            for rank, micro_batches in entries.items()
            for stage in range(depth)
        }
        self.at = dict.fromkeys(self.lists, 0)
        self.done: set[tuple[int, int, str, int]] = set()
        self.visit = {
            rank: [_visit(micro_batches, k) for k in range(len(micro_batches))]
            for rank, micro_batches in entries.items()
        }

    def run(self) -> str | None:
        moved = True
        while moved:
            moved = False
            for place in self.lists:
                while self._step(place):
                    moved = True
        stuck = [place for place in self.lists if self.at[place] < len(self.lists[place])]
        return self._describe(stuck) if stuck else None

    def _next(self, place: tuple[int, int]) -> tuple[str, int] | None:
        at = self.at[place]
        return self.lists[place][at] if at < len(self.lists[place]) else None

    def _ready(self, place: tuple[int, int], phase: str, slot: int) -> bool:
        """The neighbouring stage has delivered."""
        rank, stage = place
        neighbour = stage - 1 if phase == "F" else stage + 1
        return not 0 <= neighbour < self.depth or (rank, neighbour, phase, slot) in self.done

    def _step(self, place: tuple[int, int]) -> bool:
        operation = self._next(place)
        if operation is None or not self._ready(place, *operation):
            return False
        phase, slot = operation
        rank, stage = place
        ring = self.entries[rank][slot]
        together = [(rank, slot)]
        if ring is not None:
            for member in ring:
                theirs = self._next((member, stage)) if (member, stage) in self.lists else None
                if theirs is None or theirs[0] != phase:
                    return False
                if self.visit[member][theirs[1]] != (ring, self.visit[rank][slot][1]):
                    return False
                if not self._ready((member, stage), *theirs):
                    return False
            together = [(member, self._slot(member, stage)) for member in ring]
        for member, its_slot in together:
            self.done.add((member, stage, phase, its_slot))
            self.at[member, stage] += 1
        return True

    def _slot(self, rank: int, stage: int) -> int:
        operation = self._next((rank, stage))
        assert operation is not None
        return operation[1]

    def _describe(self, stuck: list[tuple[int, int]]) -> str:
        rank, stage = stuck[0]
        operation = self._next(stuck[0])
        assert operation is not None
        phase, slot = operation
        word = "forward" if phase == "F" else "backward"
        ring = self.entries[rank][slot]
        return (
            f"rank {rank}, stage {stage} waits for ever in the {word} of slot {slot}"
            + (f" for the ring {ring}" if ring else "")
            + f"; {len(stuck)} of {len(self.lists)} stages are stuck"
        )


def _visit(micro_batches: Sequence[Entry], slot: int) -> tuple[Entry, int]:
    """(ring, how often it was entered before): what must agree between members."""
    ring = micro_batches[slot]
    return ring, sum(1 for other in micro_batches[:slot] if other == ring)
