# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which loss `--hdp-cross-entropy` means on this launch line.

Every rank must come to the same choice: it is a function of the arguments and of the device's
memory, and part of what ranks compare before the first step.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron_hdp import cpu
from megatron_hdp.planning.device_memory import DeviceMemory
from megatron_hdp.runtime.cross_entropy.fused import why_not_usable
from megatron_hdp.runtime.cross_entropy.model import LossChoice
from megatron_hdp.runtime.cross_entropy.statistics import LossTerms
from megatron_hdp.runtime.cross_entropy.support import chunked_cannot
from megatron_hdp.runtime.device_memory import device_memory
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.validation import capacity_of


def choose_loss(options: HdpOptions, args: Namespace) -> LossChoice:
    """What `bind_loss` is given; `args` are Megatron's, after validation."""
    terms = LossTerms(options.label_smoothing, options.z_loss)
    mode = options.cross_entropy
    if mode == "auto":
        mode = _automatic(terms, device_memory(options, args), args)
    return LossChoice(mode, options.cross_entropy_chunk, terms)


def refused_capacity(options: HdpOptions, args: Namespace) -> str | None:
    """A sentence when a micro-batch of the capacity cannot fit the device, else None."""
    mode = choose_loss(options, args).mode
    plain = LossTerms(options.label_smoothing, options.z_loss) == LossTerms()
    modes = ["megatron"] if plain else []
    device = torch.device("cpu" if cpu.is_installed() else "cuda")
    modes += ["fused"] if why_not_usable(device) is None else []
    modes += [] if chunked_cannot(args) else ["chunked"]
    return device_memory(options, args).refusal(mode, capacity_of(args), modes=modes)


def _automatic(terms: LossTerms, memory: DeviceMemory, args: Namespace) -> str:
    """Megatron's own loss, unless it cannot do what is asked or would not fit."""
    if terms != LossTerms():
        return "chunked"
    if chunked_cannot(args) or memory.fits("megatron", capacity_of(args)):
        return "megatron"
    return "chunked"
