# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""All ranks must hold the same plan: its digest is compared before a step's first forward.

Without it a wrong plan aborts inside gloo with no message, hangs NCCL, or is silently wrong. The
comparison is one all_reduce of ten integers over every rank (TP and PP siblings included), on a
gloo group of its own, from the thread that prepares the next step. A rank that could not prepare
the step says so there: otherwise the others would learn only that it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.planning.values import PlanDigest
from megatron_hdp.runtime.waiting import waiting

_MASK = (1 << 62) - 1


class PlanDisagreement(RuntimeError):
    """Ranks hold different plans, or different data or options under them."""


class RankFailed(RuntimeError):
    """Another rank could not prepare a step; the message has what that one says."""


class Agreement:
    """Compares one stream's digests over the world. Made by all ranks in the same order.

    Args:
        stream: train, valid or test.
        timeout: how long to wait for the slowest rank.
        settings: what this rank runs with, by flag; only read to name a difference.
    """

    def __init__(self, stream: str, timeout: timedelta, settings: Mapping[str, str]) -> None:
        self._stream = stream
        self._settings = dict(settings)
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            with waiting(f"all ranks to set up the plan comparison of {stream}"):
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            self._roll = _RollCall(stream)

    def check(self, step: int, digest: PlanDigest) -> None:
        """Returns when all ranks have prepared the step and have the same digest.

        Raises:
            RankFailed: another rank called `fail` for this step.
            PlanDisagreement: on every rank, with the fields, flags and ranks that differ.
            RuntimeError: a rank did not answer within the timeout, or ended.
        """
        self._compare(step, digest, "")

    def fail(self, step: int, reason: str) -> None:
        """Tells the others, in place of `check`, why this rank cannot take the step.

        Raises:
            RankFailed: always where there are other ranks, unless they do not answer.
            RuntimeError: a rank did not answer within the timeout, or ended.
        """
        self._compare(step, PlanDigest(*[0] * len(PlanDigest._fields)), reason or "no reason given")

    def _compare(self, step: int, digest: PlanDigest, failure: str) -> None:
        if self._group is None:
            return
        values = [value & _MASK for value in digest]
        mine = torch.tensor([int(bool(failure)), *values], dtype=torch.int64)
        both = torch.cat((mine, -mine))
        name = f"step {step} of {self._stream}"
        self._roll.answer(step)
        try:
            with waiting(f"all ranks to compare their plan of {name}"):
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"{error} ({self._roll.missing(step)})") from error
        highest, lowest = both[: len(mine)], -both[len(mine) :]
        if highest[0]:
            raise RankFailed(_failures(name, self._gather(name, "failed", failure)))
        if torch.equal(highest, lowest):
            return
        everyone = self._gather(name, "differ", (values, self._settings))
        raise PlanDisagreement(_describe(name, *zip(*everyone, strict=True)))

    def _gather[T](self, name: str, verb: str, mine: T) -> list[T]:
        """What every rank has to say."""
        everyone: list[Any] = [None] * dist.get_world_size()
        with waiting(f"all ranks to say how their plans of {name} {verb}"):
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


class _RollCall:
    """Ranks leave word of the newest step they compared, so that a missing one can be named."""

    def __init__(self, stream: str) -> None:
        # A connection of its own: the main thread may wait in the shared one.
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone()
        self._key = f"hdp/{stream}/"

    def answer(self, step: int) -> None:
        self._store.set(f"{self._key}{dist.get_rank()}", str(step))

    def missing(self, step: int) -> str:
        """A clause that names the ranks which have not come to `step`."""
        try:
            late = [rank for rank in range(dist.get_world_size()) if self._newest(rank) < step]
        except RuntimeError:  # the store went with the rank that held it
            return "who never came is not known: the store is gone too"
        if not late:
            return "every rank came, and one ended since"
        return f"ranks {_ranges(late)} never came: dead, or still planning or reading"

    def _newest(self, rank: int) -> int:
        key = f"{self._key}{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else -1


def _describe(
    name: str, everyone: Sequence[Sequence[int]], settings: Sequence[Mapping[str, str]]
) -> str:
    """One clause per differing field and flag: which ranks hold what."""
    parts = []
    for i, field in enumerate(PlanDigest._fields):
        values = [f"{digests[i]:016x}" for digests in everyone]
        if len(set(values)) > 1:
            parts.append(f"{field} ({_holders(values)})")
    flags = []
    for flag in sorted(set().union(*settings)):
        values = [own.get(flag, "absent") for own in settings]
        if len(set(values)) > 1:
            flags.append(f"{flag} is {_holders(values)}")
    return (
        f"HDP's plan of {name} differs between ranks in {', '.join(parts)}"
        + "".join(f"; {flag}" for flag in flags)
        + ": all ranks need the same arguments, corpus files and megatron_hdp version."
    )


def _failures(name: str, reasons: Sequence[str]) -> str:
    """One clause per reason: which ranks say it."""
    failed = [(reason, rank) for rank, reason in enumerate(reasons) if reason]
    parts = [
        f"ranks {_ranges([rank for said, rank in failed if said == reason])}: {reason}"
        for reason in dict.fromkeys(reason for reason, _ in failed)
    ]
    return f"HDP cannot prepare {name}; " + "; ".join(parts)


def _holders(values: Sequence[str]) -> str:
    """['a', 'b', 'b'] -> 'a on ranks 0, b on ranks 1-2'."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on ranks {_ranges(ranks)}" for value, ranks in holders.items())


def _ranges(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
