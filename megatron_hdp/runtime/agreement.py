# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""All ranks must hold the same plan: its digest is compared before a step's first forward.

Without it a wrong plan aborts inside gloo with no message, hangs NCCL, or is silently wrong. The
comparison is one all_reduce of eight integers over every rank (TP and PP siblings included), on a
gloo group of its own, from the thread that prepares the next step.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hdp.planning.values import PlanDigest

_MASK = (1 << 62) - 1


class PlanDisagreement(RuntimeError):
    """Ranks hold different plans, or different data or options under them."""


class Agreement:
    """Compares digests over the world. Made by all ranks in the same order.

    Args:
        timeout: how long to wait for the slowest rank.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def check(self, name: str, digest: PlanDigest) -> None:
        """Returns when all ranks have the same digest.

        Args:
            name: what is compared, for the message ("step 7 of train").

        Raises:
            PlanDisagreement: on every rank, with the fields and ranks that differ.
            RuntimeError: a rank did not answer within the timeout.
        """
        if self._group is None:
            return
        mine = torch.tensor([value & _MASK for value in digest], dtype=torch.int64)
        both = torch.cat((mine, -mine))
        try:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"HDP waited {self._timeout} for all ranks to compare their plan of {name}; "
                f"at least one never came (dead, or still planning): {error}"
            ) from error
        highest, lowest = both[: len(mine)], -both[len(mine) :]
        if torch.equal(highest, lowest):
            return
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self._group)
        raise PlanDisagreement(_describe(name, everyone))


def _describe(name: str, everyone: list[torch.Tensor]) -> str:
    """One sentence per differing field: which ranks hold which digest."""
    parts = []
    for i, field in enumerate(PlanDigest._fields):
        holders: dict[int, list[int]] = {}
        for rank, values in enumerate(everyone):
            holders.setdefault(int(values[i]), []).append(rank)
        if len(holders) > 1:
            listed = "; ".join(
                f"{digest:016x} on ranks {_ranges(ranks)}" for digest, ranks in holders.items()
            )
            parts.append(f"{field} ({listed})")
    return (
        f"HDP's plan of {name} differs between ranks in {', '.join(parts)}: "
        f"all ranks need the same arguments, corpus files and megatron_hdp version."
    )


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
