# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A model of a step in which every transfer blocks: does it end, and does each meet its own?

One process per (rank, stage). Its program is Megatron's 1F1B
(`forward_backward_pipelining_without_interleaving`: which sends and receives are posted together),
with the hops of a ring inside each forward and backward. A send completes only when its receive is
posted (rendezvous, as a large NCCL message), and transfers of a channel pair up in the order in
which they were posted, whatever was meant.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

Process = tuple[int, int]
"""(rank, stage)."""
Entry = tuple[int, ...] | None
"""The ring that a micro-batch enters."""


class Transfer(NamedTuple):
    """One side of a message."""

    is_send: bool
    channel: str
    """pipeline (interleaved: F, B), kv or dkv: transfers of different channels never meet."""
    peer: Process
    what: tuple[object, ...]
    """What the sender sends, and what the receiver believes to get."""


Together = list[Transfer]
"""Posted at once; the process goes on when all of them are done."""


class Outcome(NamedTuple):
    """How the step ended. Fine when both are empty."""

    stuck: list[Process]
    mispaired: list[tuple[object, object]]
    """(what was sent, what was expected) of messages that met the wrong receive."""


def program(
    rank: int, stage: int, depth: int, entries: Sequence[Entry], experts: int = 1
) -> list[Together]:
    """What one process does in a step, as lists of transfers posted together."""
    count, last = len(entries), depth - 1
    warm_up = min(depth - stage - 1, count)

    def receive(k: int) -> Together:
        return [_pipe(False, (rank, stage - 1), "F", k)] if stage > 0 else []

    def send(k: int) -> Together:
        return [_pipe(True, (rank, stage + 1), "F", k)] if stage < last else []

    def receive_grad(k: int) -> Together:
        return [_pipe(False, (rank, stage + 1), "B", k)] if stage < last else []

    def send_grad(k: int) -> Together:
        return [_pipe(True, (rank, stage - 1), "B", k)] if stage > 0 else []

    work = partial(_work, rank, stage, entries, experts)
    steps: list[Together] = []
    for k in range(warm_up):
        steps += [receive(k), *work("F", k), send(k)]
    steady = count - warm_up
    if steady:
        steps.append(receive(warm_up))
    for i in range(steady):
        forward = warm_up + i
        steps += work("F", forward)
        steps.append(send(forward) + receive_grad(i))
        steps += work("B", i)
        steps.append(send_grad(i) + (receive(forward + 1) if i < steady - 1 else []))
    for i in range(steady, count):
        steps += [receive_grad(i), *work("B", i), send_grad(i)]
    return [step for step in steps if step]


def _pipe(is_send: bool, peer: Process, phase: str, k: int) -> Transfer:
    return Transfer(is_send, "pipeline", peer, (phase, k))


def _work(
    rank: int, stage: int, entries: Sequence[Entry], experts: int, phase: str, k: int
) -> list[Together]:
    """A layer's meetings: attention's ring, then the experts; in a backward the other way."""
    meetings = [_hops(rank, stage, phase, k, entries), _exchange(rank, stage, phase, k, experts)]
    return [step for meeting in meetings[:: 1 if phase == "F" else -1] for step in meeting]


def _exchange(rank: int, stage: int, phase: str, k: int, experts: int) -> list[Together]:
    """All-to-all among the neighbours that share experts: all sends and receives at once."""
    first = rank // experts * experts
    others = [(peer, stage) for peer in range(first, first + experts) if peer != rank]
    sides = (True, False)
    exchange = [Transfer(side, "experts", peer, (phase, k)) for peer in others for side in sides]
    return [exchange] if exchange else []


def _hops(rank: int, stage: int, phase: str, k: int, entries: Sequence[Entry]) -> list[Together]:
    """K/V round the ring; in a backward dK/dV behind them, and one hop more, home."""
    ring = entries[k]
    if ring is None:
        return []
    at, visit = ring.index(rank), sum(entry == ring for entry in entries[:k])
    to, source = (ring[at + 1 - len(ring)], stage), (ring[at - 1], stage)
    hops: list[Together] = []
    for hop in range(1, len(ring)):
        for channel in ("kv",) if phase == "F" else ("kv", "dkv"):
            what = (ring, visit, phase, hop)
            hops.append([Transfer(True, channel, to, what), Transfer(False, channel, source, what)])
    return hops


def interleaved_program(
    rank: int, stage: int, depth: int, chunks: int, group: int, entries: Sequence[Entry],
    experts: int = 1,
) -> list[Together]:  # fmt: skip
    """Of `forward_backward_pipelining_with_interleaving`, each batch of transfers waited for.

    `group` micro-batches go through one model chunk after the other; `len(entries)` is a multiple.
    """
    first, last, total = stage == 0, stage == depth - 1, len(entries) * chunks
    table = [
        (start + k, chunk)
        for start in range(0, len(entries), group)
        for chunk in range(chunks)
        for k in range(group)
    ]
    warm_up = min(2 * (depth - stage - 1) + (chunks - 1) * group, total)

    def work(phase: str, number: int) -> list[Together]:
        return _work(rank, stage, entries, experts, phase, table[number][0])

    def send(phase: str, number: int) -> Together:
        """To the next stage, from the last one round to the first; gradients the other way."""
        end = last if phase == "F" else first
        if end and table[number][1] == chunks - 1:
            return []
        step = 1 if phase == "F" else -1
        chunk = table[number][1] + end
        peer = (rank, (stage + step) % depth)
        return [Transfer(True, phase, peer, (phase, table[number][0], chunk))]

    def receive(phase: str, number: int) -> Together:
        """What operation `number` + 1 needs; the leading stage is depth - 1 operations ahead."""
        begin = first if phase == "F" else last
        peer = (rank, (stage + (-1 if phase == "F" else 1)) % depth)
        if begin:
            number -= depth - 1
            if number < 0 or table[number][1] == chunks - 1:
                return []
            return [Transfer(False, phase, peer, (phase, table[number][0], table[number][1] + 1))]
        slot, chunk = table[number + 1]
        return [Transfer(False, phase, peer, (phase, slot, chunk))]

    steps: list[Together] = [] if first else [[_first("F", rank, stage - 1)]]
    opening = [] if last else [_first("B", rank, stage + 1)]
    for k in range(warm_up):
        steps += work("F", k)
        steps.append(send("F", k) + (receive("F", k) if k < total - 1 else []))
        if k == warm_up - 1 < total - 1:
            steps[-1] += opening
    for k in range(total - warm_up):
        forward, more = warm_up + k, k < total - warm_up - 1
        steps += [*work("F", forward), *work("B", k)]
        steps.append(send("F", forward) + send("B", k))
        steps[-1] += (receive("F", forward) if more else []) + (
            receive("B", k) if k < total - 1 else []
        )
    if warm_up == total:
        steps.append(opening)
    for k in range(total - warm_up, total):
        steps += work("B", k)
        steps.append(send("B", k) + (receive("B", k) if k < total - 1 else []))
    return [step for step in steps if step]


def _first(phase: str, rank: int, peer: int) -> Transfer:
    return Transfer(False, phase, (rank, peer), (phase, 0, 0))


def run(
    entries: Sequence[Sequence[Entry]],
    depth: int,
    chunks: int = 1,
    group: int = 1,
    experts: int = 1,
) -> Outcome:
    """Runs a step.

    Args:
        entries: by rank, the ring that each micro-batch enters, in slot order.
        depth: pipeline stages.
        chunks: model chunks of each stage; above 1 the schedule is interleaved, by `group`.
        experts: neighbouring ranks that share experts.
    """
    programs = {
        (rank, stage): deque(
            program(rank, stage, depth, entries[rank], experts)
            if chunks == 1
            else interleaved_program(rank, stage, depth, chunks, group, entries[rank], experts)
        )
        for rank in range(len(entries))
        for stage in range(depth)
    }
    open_sides: dict[tuple[object, ...], deque[tuple[Process, Transfer]]] = defaultdict(deque)
    missing = dict.fromkeys(programs, 0)
    mispaired: list[tuple[object, object]] = []
    ready = deque(programs)
    while ready:
        process = ready.popleft()
        if missing[process] or not programs[process]:
            continue
        together = programs[process].popleft()
        missing[process] = len(together)
        for transfer in together:
            line = (transfer.channel, process, transfer.peer)
            other = (transfer.channel, transfer.peer, process)
            key = (*(line if transfer.is_send else other), not transfer.is_send)
            mine = (*(line if transfer.is_send else other), transfer.is_send)
            if not open_sides[key]:
                open_sides[mine].append((process, transfer))
                continue
            peer, theirs = open_sides[key].popleft()
            if theirs.what != transfer.what:
                sent, got = (transfer, theirs) if transfer.is_send else (theirs, transfer)
                mispaired.append((sent.what, got.what))
            for side in (process, peer):
                missing[side] -= 1
                if not missing[side]:
                    ready.append(side)
    return Outcome([p for p in programs if missing[p] or programs[p]], mispaired)
