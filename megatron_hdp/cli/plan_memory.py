# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`plan --vocabulary`: what each mode of the loss takes, and the capacity that it leaves."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_hdp.cli.plan_report import StepReport
from megatron_hdp.planning import PlanError, PlannerConfig
from megatron_hdp.planning.degrees import activation_bytes, layers_per_rank
from megatron_hdp.planning.device_memory import GIB, DeviceMemory
from megatron_hdp.planning.loss_memory import MODES, LossMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The group for the loss, whose modes are those of --hdp-cross-entropy."""
    loss = parser.add_argument_group("loss")
    loss.add_argument("--vocabulary", type=int, help="entries: reports the memory of each loss")
    loss.add_argument("--hidden-size", type=int, default=4096, help="of the model")
    loss.add_argument(
        "--cross-entropy", choices=("auto", *MODES), default="auto", help="the loss of the plans"
    )
    loss.add_argument(
        "--device-memory",
        type=float,
        help="GiB that parameters, gradients and optimizer leave: largest capacity of each loss",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raises PlanError for values that mean nothing."""
    if args.device_memory is None:
        return
    if not args.device_memory > 0:
        raise PlanError(f"--device-memory {args.device_memory}: give GiB above 0")
    if args.vocabulary is None:
        raise PlanError(f"--device-memory {args.device_memory} needs the --vocabulary of the loss")


class LossReport:
    """The loss of a bf16 model's last stage, with the mode that the user or `auto` takes.

    Raises:
        PlanError: the device is too small for the capacity.
    """

    def __init__(self, args: argparse.Namespace, config: PlannerConfig) -> None:
        self.memory = DeviceMemory(
            device_bytes=(args.device_memory or float("inf")) * GIB,
            token_bytes=activation_bytes(config) / config.tensor_parallel * layers_per_rank(config),
            loss=LossMemory(args.vocabulary, args.hidden_size, args.tensor),
            pipeline_depth=config.pipeline_depth,
        )
        self.bounded = args.device_memory is not None
        self.mode: str = args.cross_entropy
        if self.mode == "auto":
            fits = self.memory.fits("megatron", config.capacity)
            self.mode = "megatron" if fits else "chunked"
        refusal = self.memory.refusal(self.mode, config.capacity, "--")
        if refusal is not None:
            raise PlanError(refusal.removesuffix("."))

    @property
    def share(self) -> float:
        """`PlannerConfig.loss_share`."""
        return self.memory.loss_share(self.mode)

    def as_dict(self, steps: list[StepReport]) -> dict[str, Any]:
        """Keys of `plan --json`; bytes at the fullest micro-batch, by mode."""
        tokens = max(int(step.plan.micro_batch_tokens.max()) for step in steps)
        found: dict[str, Any] = {
            "cross_entropy": self.mode,
            "loss_bytes": {mode: self.memory.loss.peak(mode, tokens) for mode in MODES},
        }
        if self.bounded:
            found["largest_capacity"] = {m: self.memory.largest_capacity(m) for m in MODES}
        return found

    def as_text(self, steps: list[StepReport], capacity: int) -> str:
        """One line under the table."""
        found = self.as_dict(steps)
        parts = []
        for mode in MODES:
            part = f"{mode} {found['loss_bytes'][mode] / 1e9:.2f} GB"
            if self.bounded:
                over = ", does not fit" if self.memory.refusal(mode, capacity) else ", tight"
                most = found["largest_capacity"][mode]
                part += f" (capacity up to {most:,}{over if most < capacity else ''})"
            parts.append(part)
        return f"loss on the last stage, {self.mode} taken: {', '.join(parts)}"
