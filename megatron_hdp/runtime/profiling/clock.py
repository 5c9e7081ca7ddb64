# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Seconds of a piece of work, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


class Clock:
    """CPU seconds of this process, or seconds of the device.

    Ranks on a CPU may share its cores, so wall time would measure how many there are; a rank's own
    CPU time is what `busy_s` of the step records holds, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def unit(self) -> str:
        return "seconds" if self.device.type == "cuda" else "CPU seconds of a rank's process"

    def now(self) -> float:
        """Everything that was asked for before is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.process_time()

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """The median of `repeats` runs, each begun by all ranks together; mean over the ranks."""
        work()  # compiles, connects, fills caches
        taken = []
        for _ in range(repeats):
            dist.barrier()
            begun = self.now()
            work()
            taken.append(self.now() - begun)
        return self.mean(statistics.median(taken))

    def mean(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def largest(self, value: float) -> float:
        """Over all ranks."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()
