# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What HDP refuses, and what it sets, on Megatron's parsed arguments.

Runs right after parsing, before any process group exists. Every refusal is one sentence that names
the flag, the value and the way out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

from megatron_hdp.data.corpus import check_corpora, data_prefixes
from megatron_hdp.planning import PlanError
from megatron_hdp.planning.cost import CostModel
from megatron_hdp.runtime.attention.backend_support import attention_refusals
from megatron_hdp.runtime.attention.kernels import TRANSFORMER_ENGINE
from megatron_hdp.runtime.attention.support import check_attention_config
from megatron_hdp.runtime.cross_entropy.support import loss_refusals
from megatron_hdp.runtime.loader_support import loader_refusals
from megatron_hdp.runtime.moe.support import check_moe_arguments
from megatron_hdp.runtime.pipeline import virtual_stages


class ArgumentRefused(SystemExit):
    """Ends the program with the sentence on stderr and exit code 1."""


class Rule(NamedTuple):
    """One thing that is not supported yet."""

    attribute: str
    bad: Callable[[object], bool]
    flag: str
    way_out: str


def _set(value: object) -> bool:
    return bool(value)


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _positive(value: object) -> bool:
    return isinstance(value, float | int) and value > 0


_NOT_YET = "it is not supported with HDP yet: leave it out, or train without --hdp"

RULES = (
    Rule("hybrid_context_parallel", _set, "--hybrid-context-parallel", "use --hdp alone instead"),
    Rule("mtp_num_layers", _set, "--mtp-num-layers", _NOT_YET),
    Rule("overlap_moe_expert_parallel_comm", _set, "--overlap-moe-expert-parallel-comm", _NOT_YET),
    Rule("hybrid_layer_pattern", _set, "--hybrid-layer-pattern", _NOT_YET),
    Rule("use_megatron_fsdp", _set, "--use-megatron-fsdp", _NOT_YET),
    Rule("use_torch_fsdp2", _set, "--use-torch-fsdp2", _NOT_YET),
    Rule("overlap_param_gather_with_optimizer_step", _set,
         "--overlap-param-gather-with-optimizer-step", _NOT_YET),
    Rule("num_distributed_optimizer_instances", _more_than_one,
         "--num-distributed-optimizer-instances", _NOT_YET),
    Rule("cpu_offloading_num_layers", _positive, "--cpu-offloading-num-layers",
         "use --hdp-offload instead: of two offloads over one layer only the inner one would act"),
    Rule("fine_grained_activation_offloading", _set, "--fine-grained-activation-offloading",
         "use --hdp-offload instead: of two offloads over one layer only the inner one would act"),
    Rule("distribute_saved_activations", _set, "--distribute-saved-activations", _NOT_YET),
    Rule("inprocess_restart", _set, "--inprocess-restart", _NOT_YET),
    Rule("perform_rl_step", _set, "--perform-rl-step", _NOT_YET),
    Rule("sft", _set, "--sft",
         "chats in .jsonl, .parquet and the like train on their answers without it: leave it out"),
    Rule("rampup_batch_size", _set, "--rampup-batch-size", _NOT_YET),
    Rule("phase_transition_iterations", _set, "--phase-transition-iterations", _NOT_YET),
    Rule("full_validation", _set, "--full-validation", "use --eval-iters instead"),
    Rule("multiple_validation_sets", _set, "--multiple-validation-sets", _NOT_YET),
    Rule("reset_attention_mask", _set, "--reset-attention-mask",
         "documents are told apart by --dataloader-inter-document-masking"),
    Rule("reset_position_ids", _set, "--reset-position-ids",
         "positions restart per sequence already: leave it out"),
    Rule("check_for_spiky_loss", _set, "--check-for-spiky-loss",
         "it compares sums per micro-batch, which mean nothing when those differ: leave it out"),
    Rule("hidden_dropout", _positive, "--hidden-dropout", "pass --hidden-dropout 0.0"),
    Rule("dataloader_defer_npy_index_mmap", _set, "--dataloader-defer-npy-index-mmap",
         "leave it out"),
    Rule("data_parallel_random_init", _set, "--data-parallel-random-init", "leave it out"),
)  # fmt: skip

_CHUNKS_WITH_OFFLOAD = 2

_SUPPORTED_POSITIONS = ("rope", "none", "learned_absolute")


def prepare_arguments(args: argparse.Namespace) -> None:
    """Checks the arguments, then sets what HDP needs.

    Raises:
        ArgumentRefused: with one sentence; exit code 1.
    """
    for refusal in refusals(args):
        raise ArgumentRefused(f"megatron_hdp: {refusal}")
    try:
        check_corpora(data_prefixes(args))
    except ValueError as error:
        raise ArgumentRefused(f"megatron_hdp: {error}") from error
    args.hdp = True
    # Gradients are sums over tokens: without it they are wrong while the first loss looks right.
    args.calculate_per_token_loss = True
    args.create_attention_mask_in_dataloader = False
    if getattr(args, "hdp_attention", None) == TRANSFORMER_ENGINE:
        # Single transfers would make a two-rank NCCL communicator per peer in every ring's group.
        os.environ.setdefault("NVTE_BATCH_MHA_P2P_COMM", "1")


def refusals(args: argparse.Namespace) -> list[str]:
    """Every sentence that applies, the most basic first."""
    found = _own_option_refusals(args)
    for rule in RULES:
        value = getattr(args, rule.attribute, None)
        if rule.bad(value):
            shown = "" if value is True else f" {value}"
            found.append(f"{rule.flag}{shown}: {rule.way_out}.")
    found += check_attention_config(args) + check_moe_arguments(args) + loss_refusals(args)
    positions = getattr(args, "position_embedding_type", "rope")
    if positions not in _SUPPORTED_POSITIONS:
        found.append(
            f"--position-embedding-type {positions} is not supported with HDP yet: "
            f"use one of {', '.join(_SUPPORTED_POSITIONS)}."
        )
    micro_batch_size = getattr(args, "micro_batch_size", 1)
    if micro_batch_size not in (None, 1):
        found.append(
            f"--micro-batch-size {micro_batch_size}: HDP forms its micro-batches by tokens: "
            f"pass --micro-batch-size 1."
        )
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    if shards not in (None, getattr(args, "tensor_model_parallel_size", shards)):
        found.append(f"--tensor-parallel-num-weight-shards {shards}: {_NOT_YET}.")
    if getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "delayed") == "delayed":
        found.append(
            "--fp8-recipe delayed exchanges maxima in every forward, which unequal micro-batch "
            "counts cannot: use --fp8-recipe tensorwise, blockwise or mxfp8."
        )
    if getattr(args, "cuda_graph_impl", "none") not in (None, "none"):
        found.append(
            f"--cuda-graph-impl {args.cuda_graph_impl} needs fixed shapes, which HDP's "
            f"micro-batches do not have: leave it out."
        )
    return found


def _own_option_refusals(args: argparse.Namespace) -> list[str]:
    found = []
    capacity = getattr(args, "hdp_capacity", None)
    if capacity is not None and capacity < 1:
        found.append(
            f"--hdp-capacity {capacity}: a rank must hold at least one token: give a positive "
            f"number, or leave it out for seq-length / context-parallel-size."
        )
    memory = getattr(args, "hdp_device_memory", None)
    if memory is not None and not memory > 0:
        found.append(f"--hdp-device-memory {memory}: give GiB above 0, or leave it out.")
    ahead = getattr(args, "hdp_plan_ahead", 0)
    if ahead < 0:
        found.append(f"--hdp-plan-ahead {ahead}: give 0 or more steps.")
    timeout = getattr(args, "hdp_timeout_minutes", 1.0)
    if not timeout > 0:
        found.append(f"--hdp-timeout-minutes {timeout}: give a positive number.")
    found += _offload_refusals(args) + attention_refusals(args) + loader_refusals(args)
    profile = getattr(args, "hdp_profile", None)
    if profile is not None:
        try:
            CostModel.load(profile)
        except PlanError as error:
            found.append(f"--hdp-profile: {error}.")
    return found


def _offload_refusals(args: argparse.Namespace) -> list[str]:
    planned, ratio = getattr(args, "hdp_offload", False), getattr(args, "hdp_offload_ratio", None)
    memory = getattr(args, "hdp_host_memory", 1.0)
    found = []
    if ratio is not None and not 0 <= ratio <= 1:
        found.append(f"--hdp-offload-ratio {ratio}: give a share from 0 to 1.")
    if ratio is not None and planned:
        found.append(
            f"--hdp-offload-ratio {ratio} takes the place of the planned ratios of --hdp-offload: "
            f"give one of the two."
        )
    experts = getattr(args, "num_experts", None)
    if planned and experts:
        found.append(
            f"--hdp-offload with --num-experts {experts}: the planner does not know yet what MoE "
            f"layers save: pass --hdp-offload-ratio with a share of your own."
        )
    # Every chunk's last layer stays on the device, and Eq. 3 counts two layers in all.
    chunks, given = virtual_stages(args) if planned else (1, "")
    if chunks > _CHUNKS_WITH_OFFLOAD:
        found.append(
            f"{given} with --hdp-offload: each of {chunks} virtual pipeline stages keeps a layer on"
            f" the device, and the planner counts two in all: give at most "
            f"{_CHUNKS_WITH_OFFLOAD} virtual stages, or pass --hdp-offload-ratio with a share of "
            f"your own."
        )
    if not memory > 0:
        found.append(f"--hdp-host-memory {memory}: give GiB above 0.")
    # Autograd's hooks hand out plain tensors for parameters, and the fused local linear layer
    # marks the parameter that it is handed; Transformer Engine's keeps a reference of its own.
    fused = getattr(args, "gradient_accumulation_fusion", False)
    if (planned or ratio) and fused and getattr(args, "transformer_impl", "") == "local":
        found.append(
            "--hdp-offload with --transformer-impl local: pass --no-gradient-accumulation-fusion."
        )
    return found


def capacity_of(args: argparse.Namespace) -> int:
    """Tokens per rank in one micro-batch: `--hdp-capacity` or seq_length / static CP size."""
    explicit: int | None = args.hdp_capacity
    if explicit is not None:
        return explicit
    return -(-int(args.seq_length) // int(args.context_parallel_size))


def check_capacity(args: argparse.Namespace, domain_size: int) -> str | None:
    """A sentence when one sequence of the context length cannot fit the domain, else None."""
    capacity = capacity_of(args)
    if capacity * domain_size >= args.seq_length:
        return None
    return (
        f"--hdp-capacity {capacity} x {domain_size} ranks cannot hold one sequence of "
        f"--seq-length {args.seq_length}: give at least {-(-args.seq_length // domain_size)}."
    )
