# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Proof that no wait cycle exists: walks every rank's forwards and backwards to the end.

Each stage of each rank has a fixed list of operations (1F1B). An operation consists of meetings:
with the ring's members, and with the ranks that share experts. As a layer has its attention before
its experts, a forward meets the ring first, a backward the experts; one layer stands for all. A
meeting runs when it is the next one of every member. If the walk stops before the lists end, what
is left waits in a cycle. Unlike the rules of `validation.py` it takes slots as they are, so it also
judges ring entries that differ from member to member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Entry = tuple[int, ...] | None
"""The ring that a micro-batch enters (its ranks), None for a local one."""


class _Meeting(NamedTuple):
    """One point of a stage's list where ranks wait for each other."""

    phase: str
    slot: int
    members: tuple[int, ...]
    which: object
    """What members must agree on: a ring's visit, or the slot of an experts' exchange."""


def schedule(stage: int, depth: int, count: int) -> list[tuple[str, int]]:
    """1F1B operations of one stage: ("F" or "B", micro-batch), in order."""
    warm_up = min(depth - stage - 1, count)
    operations = [("F", k) for k in range(warm_up)]
    for i in range(count - warm_up):
        operations += [("F", warm_up + i), ("B", i)]
    return operations + [("B", i) for i in range(count - warm_up, count)]


def find_deadlock(
    entries: Mapping[int, Sequence[Entry]], depth: int, expert_ranks: int = 1
) -> str | None:
    """A sentence naming who waits for whom, or None when everything ends.

    Args:
        entries: per rank, the ring that each of its micro-batches enters; a ring's k-th entry on
            one member meets its k-th entry on the others.
        depth: pipeline stages; every stage of a rank runs the same micro-batches.
        expert_ranks: neighbouring ranks that share experts: they meet in every operation.
    """
    return _Walk(entries, depth, expert_ranks).run()


Place = tuple[int, int]
"""(rank, stage)."""


class _Walk:
    """Runs operations as long as any can."""

    def __init__(
        self, entries: Mapping[int, Sequence[Entry]], depth: int, expert_ranks: int
    ) -> None:
        self.depth = depth
        meetings = {
            rank: [_meetings(rank, micro_batches, slot, expert_ranks)
                   for slot in range(len(micro_batches))]
            for rank, micro_batches in entries.items()
        }  # fmt: skip
        self.lists: dict[Place, list[_Meeting]] = {
            (rank, stage): [
                meeting._replace(phase=phase)
                for phase, slot in schedule(stage, depth, len(micro_batches))
                for meeting in meetings[rank][slot][:: 1 if phase == "F" else -1]
            ]
            for rank, micro_batches in entries.items()
            for stage in range(depth)
        }
        self.at = dict.fromkeys(self.lists, 0)
        self.done: set[tuple[int, int, str, int]] = set()

    def run(self) -> str | None:
        moved = True
        while moved:
            moved = False
            for place in self.lists:
                while self._step(place):
                    moved = True
        stuck = [place for place in self.lists if self._next(place) is not None]
        return self._describe(stuck) if stuck else None

    def _next(self, place: Place) -> _Meeting | None:
        meetings, at = self.lists.get(place, []), self.at.get(place, 0)
        return meetings[at] if at < len(meetings) else None

    def _ready(self, place: Place, meeting: _Meeting) -> bool:
        """The neighbouring stage has delivered."""
        rank, stage = place
        neighbour = stage - 1 if meeting.phase == "F" else stage + 1
        delivered = (rank, neighbour, meeting.phase, meeting.slot) in self.done
        return delivered or not 0 <= neighbour < self.depth

    def _step(self, place: Place) -> bool:
        mine = self._next(place)
        if mine is None:
            return False
        places = [(member, place[1]) for member in mine.members]
        for other in places:
            theirs = self._next(other)
            if theirs is None or (theirs.phase, theirs.members, theirs.which) != (
                mine.phase, mine.members, mine.which
            ):  # fmt: skip
                return False
            if not self._ready(other, theirs):
                return False
        for other in places:
            self._advance(other)
        return True

    def _advance(self, place: Place) -> None:
        before = self._next(place)
        self.at[place] += 1
        after = self._next(place)
        assert before is not None
        if after is None or (after.phase, after.slot) != (before.phase, before.slot):
            self.done.add((*place, before.phase, before.slot))

    def _describe(self, stuck: list[Place]) -> str:
        rank, stage = stuck[0]
        meeting = self._next(stuck[0])
        assert meeting is not None
        word = "forward" if meeting.phase == "F" else "backward"
        what = "the experts of ranks" if meeting.which == meeting.slot else "the ring"
        return (
            f"rank {rank}, stage {stage} waits for ever in the {word} of slot {meeting.slot}"
            + (f" for {what} {meeting.members}" if len(meeting.members) > 1 else "")
            + f"; {len(stuck)} of {len(self.lists)} stages are stuck"
        )


def _meetings(
    rank: int, micro_batches: Sequence[Entry], slot: int, expert_ranks: int
) -> list[_Meeting]:
    """Of a forward, in order; a micro-batch that meets nobody has one with itself."""
    found = []
    ring = micro_batches[slot]
    if ring is not None:
        visit = sum(1 for other in micro_batches[:slot] if other == ring)
        found.append(_Meeting("F", slot, ring, ("visit", visit)))
    if expert_ranks > 1:
        first = rank // expert_ranks * expert_ranks
        found.append(_Meeting("F", slot, tuple(range(first, first + expert_ranks)), slot))
    return found or [_Meeting("F", slot, (rank,), slot)]
