# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What a launch line takes of a rank's device: states, activations, loss."""

from __future__ import annotations

import copy
from argparse import Namespace

import torch

from megatron_hdp import cpu
from megatron_hdp.planning.activations import recomputed_bytes, saved_bytes
from megatron_hdp.planning.device_memory import GIB, DeviceMemory
from megatron_hdp.planning.loss_memory import LossMemory
from megatron_hdp.runtime.model_shape import model_shape
from megatron_hdp.runtime.options import HdpOptions


def device_memory(options: HdpOptions, args: Namespace) -> DeviceMemory:
    """The estimate that `auto`, the check of the capacity and offload's ratios go by.

    Args:
        args: Megatron's, after validation.
    """
    shape = model_shape(args)
    return DeviceMemory(
        device_bytes=_device_bytes(options),
        token_bytes=saved_bytes(shape) * shape.num_layers,
        loss=_loss_memory(options, args),
        state_bytes=state_bytes(args),
        recomputed_bytes=recomputed_bytes(shape),
        pipeline_depth=args.pipeline_model_parallel_size,
    )


def _device_bytes(options: HdpOptions) -> float:
    """Infinite on a CPU, unless the user says what is to be there."""
    if options.device_memory is not None:
        return options.device_memory * GIB
    if cpu.is_installed():
        return float("inf")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _loss_memory(options: HdpOptions, args: Namespace) -> LossMemory:
    return LossMemory(
        vocabulary=args.padded_vocab_size or args.vocab_size,
        hidden_size=args.hidden_size,
        tensor_parallel=args.tensor_model_parallel_size,
        element_bytes=args.params_dtype.itemsize,
        chunk=options.cross_entropy_chunk,
        sums_in_main_grad=args.gradient_accumulation_fusion,
    )


def state_bytes(args: Namespace) -> float:
    """Parameters, gradients and optimizer on the fullest rank.

    Megatron's own estimator counts the parameters; its bytes per parameter hold for bf16 alone.
    Adam's moments only: other optimizers' states come on top.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    plain = copy.copy(args)  # the estimator sets num_query_groups
    plain.use_distributed_optimizer = False
    parameters: float = compute_weight_and_optimizer_memory(plain) / _ESTIMATORS_BYTES
    element = args.params_dtype.itemsize
    gradient = element if getattr(args, "grad_reduce_in_bf16", False) else 4
    return parameters * (element + gradient + _optimizer_bytes(args, element))


_ESTIMATORS_BYTES = 18
"""Per parameter, in compute_weight_and_optimizer_memory without a distributed optimizer."""


def _optimizer_bytes(args: Namespace, element: int) -> float:
    """Per parameter of a rank."""
    held = 4.0 if element < 4 else 0.0
    if args.optimizer == "adam":
        held += args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    if args.optimizer_cpu_offload:
        held *= 1 - args.optimizer_offload_fraction
    sharded = args.data_parallel_size * args.context_parallel_size
    return held / sharded if args.use_distributed_optimizer else held
