# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""T(s) of the layers and of the whole model, a ring, and what a step costs besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_hdp.runtime.profiling.clock import Clock
from megatron_hdp.runtime.profiling.probe import Probe


class Times(NamedTuple):
    """Seconds for one sequence of `length` tokens on one rank."""

    length: int
    layer_forward_s: float
    """Of one layer."""
    layer_backward_s: float
    model_s: float
    """Forward and backward of the probe's layers with embedding, output layer and loss."""
    model_forward_s: float


class MicroBatchTime(NamedTuple):
    """Seconds of a micro-batch of several sequences, or of one on a ring."""

    lengths: list[int]
    ring: int
    """Members; 1 is alone."""
    model_s: float


def lengths_to_measure(capacity: int, longest: int | None = None) -> list[int]:
    """Six lengths, doubling up to what a rank holds of one micro-batch."""
    top = min(capacity, longest or capacity)
    return sorted({max(1, top >> shift) for shift in range(6)})


def measure_length(probe: Probe, clock: Clock, length: int, repeats: int) -> Times:
    """All ranks run a sequence of this length at once, each its own."""
    micro_batch = probe.micro_batch([length])
    forward, both = probe.decoder_of(micro_batch)
    layers = probe.num_layers
    forward_s = clock.seconds(forward, repeats)
    both_s = clock.seconds(both, repeats)
    model_forward_s = clock.seconds(lambda: probe.forward(micro_batch), repeats)
    model_s = clock.seconds(lambda: probe.forward_and_backward(micro_batch), repeats)
    backward_s = max(both_s - forward_s, 0.01 * both_s)
    return Times(length, forward_s / layers, backward_s / layers, model_s, model_forward_s)


def measure_micro_batch(
    probe: Probe, clock: Clock, lengths: list[int], ring: int, repeats: int
) -> MicroBatchTime:
    """Whole sequences, alone on every rank at once, or on a ring of all ranks."""
    micro_batch = probe.micro_batch(lengths, ring)
    seconds = clock.seconds(lambda: probe.forward_and_backward(micro_batch), repeats)
    return MicroBatchTime(lengths, ring, seconds)


def micro_batches_to_measure(lengths: list[int], ranks: int) -> list[tuple[list[int], int]]:
    """(sequences, ring): what planners make of short and of long sequences.

    Short ones are packed to the capacity, on one rank, and, as a static mesh has them, on a ring of
    all; long ones fill such a ring, and a short ring shows what a hop costs by itself.
    """
    top = lengths[-1]
    sizes = [1] if ranks == 1 else [1, ranks]
    packs = [([top * size // count] * count, size) for size in sizes for count in (4, 16)
             if top >= count]  # fmt: skip
    if ranks == 1:
        return packs
    members = sorted({lengths[0], lengths[len(lengths) // 2], top})
    return packs + [([tokens * ranks], ranks) for tokens in members]


def measure_step(probe: Probe, clock: Clock, repeats: int) -> dict[str, float]:
    """Seconds, per rank, that come once a step: gradients' end, and the optimizer."""
    from megatron.core.distributed import finalize_model_grads

    micro_batch = probe.micro_batch([16])

    def count() -> torch.Tensor:
        return torch.tensor(16, dtype=torch.int, device=probe.device)

    def prepare() -> None:
        probe.wrapped.zero_grad_buffer()
        probe.optimizer.zero_grad()
        probe.forward(micro_batch).backward()

    def after(done: Callable[[], object]) -> float:
        """Seconds of `done` after a forward and a backward, which are taken off again."""

        def whole() -> None:
            prepare()
            done()

        return max(clock.seconds(whole, repeats) - clock.seconds(prepare, repeats), 0.0)

    sync_s = after(lambda: finalize_model_grads([probe.wrapped], count()))

    def step() -> None:
        finalize_model_grads([probe.wrapped], count())
        probe.optimizer.step()

    return {"gradient_sync_s": sync_s, "optimizer_s": max(after(step) - sync_s, 0.0)}


def parameters_here(probe: Probe) -> int:
    """Parameters of the probe on this rank."""
    return sum(parameter.numel() for parameter in probe.model.parameters())
