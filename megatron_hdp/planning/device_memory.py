# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which capacity a device's memory allows, by the mode of the loss."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hdp.planning.loss_memory import MODES, LossMemory

GIB = 2**30
USABLE_SHARE = 0.9
"""Of a device's memory; the rest goes to communicators, workspaces and fragmentation."""

_MOST_TOKENS = 2**40


@dataclass(frozen=True)
class DeviceMemory:
    """An estimate of the fullest pipeline stage, from below: what is not named here comes on top.

    1F1B's first of p stages holds the activations of p micro-batches; its last one those of one,
    and then the loss, which is gone before a recomputed layer comes back.
    """

    device_bytes: float
    token_bytes: float
    """Saved per token by a stage's layers on one rank (`activations.saved_bytes` x layers)."""
    loss: LossMemory
    state_bytes: float = 0.0
    """Parameters, gradients and optimizer on one rank."""
    recomputed_bytes: float = 0.0
    """Per token, of the layers that one step of full recompute brings back."""
    pipeline_depth: int = 1

    def needed(self, mode: str, capacity: int) -> float:
        """Bytes at `capacity` tokens per rank and micro-batch."""
        last = capacity * self.token_bytes + self.loss.peak(mode, capacity)
        first = self.pipeline_depth * self.token_bytes + self.recomputed_bytes
        return self.state_bytes + max(capacity * first, last)

    def fits(self, mode: str, capacity: int) -> bool:
        """Whether the usable share of the device is enough."""
        return self.needed(mode, capacity) <= USABLE_SHARE * self.device_bytes

    def largest_capacity(self, mode: str) -> int:
        """Most tokens that fit, 0 if none."""
        return bisect.bisect_left(
            range(1, _MOST_TOKENS), True, key=lambda tokens: not self.fits(mode, tokens)
        )

    def loss_share(self, mode: str) -> float:
        """`PlannerConfig.loss_share` of a mode."""
        return self.loss.bytes_per_token(mode) / self.token_bytes

    @property
    def recomputed_share(self) -> float:
        """`PlannerConfig.recomputed_share`."""
        return self.recomputed_bytes / self.token_bytes

    def refusal(
        self,
        mode: str,
        capacity: int,
        prefix: str = "--hdp-",
        modes: Sequence[str] = MODES,
    ) -> str | None:
        """One sentence when the whole device is too small, else None.

        Args:
            prefix: of the flags for capacity, cross-entropy and device memory.
            modes: those that the user could take instead.
        """
        needed = self.needed(mode, capacity)
        if needed <= self.device_bytes:
            return None
        own = self.largest_capacity(mode)
        others = {other: self.largest_capacity(other) for other in modes if other != mode}
        ways = [f"{prefix}capacity {own}"] if own else []
        ways += [
            f"{prefix}cross-entropy {other} with at most {most}"
            for other, most in others.items()
            if most > own
        ]
        way_out = "give at most " + ", or ".join(ways) if ways else "shard the model further"
        states = f"{_gib(self.state_bytes)} for parameters, gradients and optimizer, "
        return (
            f"{prefix}capacity {capacity} with {prefix}cross-entropy {mode} needs about "
            f"{_gib(needed)} ({states if self.state_bytes else ''}"
            f"{_gib(self.loss.peak(mode, capacity))} for the loss), more than the device's "
            f"{_gib(self.device_bytes)} ({prefix}device-memory): {way_out}."
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
