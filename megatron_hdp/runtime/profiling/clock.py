# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Seconds of a piece of work, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_hdp.runtime.profiling.reference import reference_s
from megatron_hdp.runtime.waiting import waiting


class Clock:
    """CPU seconds of this process, or seconds of the device.

    Ranks on a CPU may share its cores, so wall time would measure how many there are; a rank's own
    CPU time is what `busy_s` of the step records holds, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reference_s = self._reference()
        """What the reference work took at first; every later time is brought to that speed."""
        self._last = self.reference_s

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
        """The median of `repeats` runs, each begun by all ranks together; mean over the ranks.

        On a CPU, at the speed that the machine had when the clock was made.
        """
        work()  # compiles, connects, fills caches
        taken = []
        for _ in range(repeats):
            with waiting("all ranks to begin a measurement together"):
                dist.barrier()
            begun = self.now()
            work()
            taken.append(self.now() - begun)
        seconds = self.mean(statistics.median(taken))
        if self.device.type == "cuda":
            return seconds
        before, self._last = self._last, self._reference()
        return seconds * 2 * self.reference_s / (before + self._last)

    def _reference(self) -> float:
        """Mean over the ranks; of no use on a device of one's own."""
        return self.mean(reference_s()) if self.device.type == "cpu" else 0.0

    def mean(self, value: float) -> float:
        """Over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        with waiting("all ranks' times of a measurement"):
            dist.all_reduce(total)
        return total.item() / dist.get_world_size()
