# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which loss `--hdp-cross-entropy` means on this launch line.

Every rank must come to the same choice: it is a function of the arguments and of the device's
memory, and part of what ranks compare before the first step.
"""

from __future__ import annotations

import copy
from argparse import Namespace

import torch

from megatron_hdp import cpu
from megatron_hdp.planning.loss_memory import LossMemory
from megatron_hdp.runtime.cross_entropy.model import LossChoice
from megatron_hdp.runtime.cross_entropy.statistics import LossTerms
from megatron_hdp.runtime.cross_entropy.support import chunked_cannot
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.validation import capacity_of

USABLE_SHARE = 0.9
"""Of a device's memory; the rest goes to communicators, workspaces and fragmentation."""


def choose_loss(options: HdpOptions, args: Namespace) -> LossChoice:
    """What `bind_loss` is given; `args` are Megatron's, after validation."""
    terms = LossTerms(options.label_smoothing, options.z_loss)
    mode = options.cross_entropy
    if mode == "auto":
        mode = _automatic(terms, loss_memory(options, args), args)
    return LossChoice(mode, options.cross_entropy_chunk, terms)


def loss_memory(options: HdpOptions, args: Namespace) -> LossMemory:
    """What the loss takes on the last pipeline stage of this launch line."""
    return LossMemory(
        vocabulary=args.padded_vocab_size or args.vocab_size,
        hidden_size=args.hidden_size,
        tensor_parallel=args.tensor_model_parallel_size,
        element_bytes=args.params_dtype.itemsize,
        chunk=options.cross_entropy_chunk,
        sums_in_main_grad=args.gradient_accumulation_fusion,
    )


def _automatic(terms: LossTerms, memory: LossMemory, args: Namespace) -> str:
    """Megatron's own loss, unless it cannot do what is asked or would not fit."""
    if terms != LossTerms():
        return "chunked"
    device_bytes = _device_bytes()
    if device_bytes is None or chunked_cannot(args):
        return "megatron"
    capacity = capacity_of(args)
    taken = model_bytes(args, capacity) + memory.peak("megatron", capacity)
    return "megatron" if taken <= USABLE_SHARE * device_bytes else "chunked"


def _device_bytes() -> int | None:
    if cpu.is_installed():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def model_bytes(args: Namespace, capacity: int) -> float:
    """Estimate of what the last stage holds beside the loss, without the logits.

    Parameters, gradients and optimizer by Megatron's own estimator; activations of one micro-batch
    (1F1B's last stage has no more) by the 34 s b h of Korthikanti et al. (2022) without attention
    scores, or 2 s b h with full recompute.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    states: float = compute_weight_and_optimizer_memory(copy.copy(args))  # it sets num_query_groups
    layers = args.num_layers / args.pipeline_model_parallel_size
    per_token = (2 if args.recompute_granularity == "full" else 34) * args.hidden_size
    return states + capacity * layers * per_token / args.tensor_model_parallel_size
