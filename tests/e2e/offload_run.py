# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's real training with given offload ratios, and what the engine counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tests.e2e.harness import Recorded, pretrain

RATIOS = (0.0, 0.25, 1 / 3, 0.5, 0.7, 1.0)


@dataclass
class Counted:
    """One micro-batch's forward under offload."""

    ratio: float
    tokens: int
    layers: list
    device_peak: int


@dataclass
class OffloadRun:
    """One rank's run."""

    recorded: Recorded
    micro_batches: list[Counted] = field(default_factory=list)
    base: list[tuple[int, int]] = field(default_factory=list)
    """(device bytes, host bytes) that saved tensors held after every training step."""
    most_in_flight: int = 0


def train(
    argv: list[str], *, mixed_ratios: bool = False, fp64: bool = False, keep_grads: int = 0
) -> OffloadRun:
    """For a forked rank.

    Args:
        mixed_ratios: plans come with every ratio of RATIOS in turn, by micro-batch and step.
    """
    from megatron_hdp.runtime.offload import engine

    run = OffloadRun(Recorded())
    enter, leave = engine.MicroBatchOffload.__enter__, engine.MicroBatchOffload.__exit__

    def enter_counted(self):
        from megatron_hdp.runtime.context import current_micro_batch

        self.tokens = current_micro_batch().state.layout.num_tokens
        return enter(self)

    def leave_counted(self, *error):
        leave(self, *error)
        run.micro_batches.append(Counted(self.ratio, self.tokens, self.layers, self))
        alive = [m for m in run.micro_batches if m.device_peak._account.device_bytes]
        run.most_in_flight = max(run.most_in_flight, len(alive))

    engine.MicroBatchOffload.__enter__ = enter_counted
    engine.MicroBatchOffload.__exit__ = leave_counted
    if mixed_ratios:
        _mix_ratios()
    _watch_steps(run)
    run.recorded = pretrain(argv, fp64=fp64, keep_grads=keep_grads)
    for counted in run.micro_batches:
        counted.device_peak = counted.device_peak.device_peak
    return run


def _mix_ratios() -> None:
    """Makes plans carry ratios; who runs a plan does what it says."""
    from megatron_hdp.planning.degrees import layers_per_rank
    from megatron_hdp.runtime.planner import PlanInPlace

    get = PlanInPlace.get

    def get_with_ratios(self, step):
        plan = get(self, step)
        slots = np.concatenate([np.arange(count) for count in plan.micro_batch_counts])
        ratios = np.asarray(RATIOS)[(slots + step) % len(RATIOS)]
        plan = replace(plan, offload_ratios=ratios, num_layers=layers_per_rank(self._config))
        plan.validate()
        return plan

    PlanInPlace.get = get_with_ratios


def _watch_steps(run: OffloadRun) -> None:
    from megatron.training import training

    from megatron_hdp.runtime import session

    train_step = training.train_step

    def watched(*args, **kwargs):
        result = train_step(*args, **kwargs)
        offload = session.current_session().offload
        if offload is not None:
            offload.slabs.settle()
            run.base.append((offload.account.device_bytes, offload.slabs.used_bytes))
        return result

    training.train_step = watched
