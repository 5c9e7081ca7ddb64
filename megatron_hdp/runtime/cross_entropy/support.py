# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What the loss's options refuse, on arguments that Megatron has not validated yet."""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron_hdp import cpu
from megatron_hdp.runtime.cross_entropy.fused import why_not_usable

CHUNKED_CANNOT = {
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
    "use_mup": "--use-mup",
    "fp8_output_proj": "--fp8-output-proj",
}
"""Attributes of Megatron's arguments that the chunked loss would ignore."""


def chunked_cannot(args: Namespace) -> list[str]:
    """Flags set that the chunked loss does not support."""
    return [flag for name, flag in CHUNKED_CANNOT.items() if getattr(args, name, False)]


def loss_refusals(args: Namespace) -> list[str]:
    """Every sentence that applies."""
    mode = getattr(args, "hdp_cross_entropy", "megatron")
    smoothing, z_loss = getattr(args, "hdp_label_smoothing", 0), getattr(args, "hdp_z_loss", 0)
    found = _values_refused(getattr(args, "hdp_cross_entropy_chunk", 1), smoothing, z_loss)
    if mode == "megatron":
        found += [
            f"{flag} {value}: Megatron's own loss has none: pass --hdp-cross-entropy chunked."
            for flag, value in (("--hdp-label-smoothing", smoothing), ("--hdp-z-loss", z_loss))
            if value
        ]
    if mode == "fused":
        reason = why_not_usable(torch.device("cpu" if cpu.is_installed() else "cuda"))
        if reason is not None:
            found.append(
                f"--hdp-cross-entropy fused: {reason}: pass --hdp-cross-entropy chunked or auto."
            )
    if mode == "chunked" or (mode == "auto" and (smoothing or z_loss)):
        found += [
            f"{flag} is not supported by the chunked loss, which --hdp-cross-entropy {mode} takes "
            f"here: leave it out, or pass --hdp-cross-entropy megatron."
            for flag in chunked_cannot(args)
        ]
    return found


def _values_refused(chunk: int, smoothing: float, z_loss: float) -> list[str]:
    found = []
    if chunk < 1:
        found.append(f"--hdp-cross-entropy-chunk {chunk}: give at least one token.")
    if not 0 <= smoothing < 1:
        found.append(f"--hdp-label-smoothing {smoothing}: give 0 or more, and less than 1.")
    if not 0 <= z_loss < float("inf"):
        found.append(f"--hdp-z-loss {z_loss}: give 0 or more.")
    return found
