# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's MoE settings mean the same under every plan."""

from __future__ import annotations

from typing import Any

_ROUTING = ("none", "aux_loss", "seq_aux_loss")
_WAY_OUT = "leave it out, or train without --hdp"


def expert_ranks(args: Any, num_ranks: int) -> int:
    """Neighbouring HDP ranks that meet inside a layer for their experts; 1: none do.

    Megatron lays experts out as expert TP, then EP, over the ranks of a pipeline stage
    (`megatron.core.parallel_state`); an HDP rank is a tensor-parallel group of those.
    """
    if not getattr(args, "num_experts", None):
        return 1
    tensor = args.tensor_model_parallel_size
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None) or tensor
    block = (getattr(args, "expert_model_parallel_size", None) or 1) * expert_tensor
    if block % tensor == 0:
        return block // tensor
    return 1 if tensor % block == 0 else num_ranks  # blocks that straddle chain all ranks


def exchange_bytes(args: Any) -> float:
    """Bytes per token and layer that go to the experts and back, forward and backward."""
    if not getattr(args, "num_experts", None):
        return 0.0
    width = 2 if getattr(args, "bf16", False) or getattr(args, "fp16", False) else 4
    return 4.0 * args.moe_router_topk * args.hidden_size * width


def check_moe_arguments(args: Any) -> list[str]:
    """One sentence for each MoE setting that HDP does not support; `args` are Megatron's."""
    if not getattr(args, "num_experts", None):
        return []
    return [
        sentence
        for check in (_routing, _dispatcher, _per_micro_batch, _recompute)
        for sentence in check(args)
    ]


def _routing(args: Any) -> list[str]:
    kinds = args.moe_router_load_balancing_type
    return [
        f"--moe-router-load-balancing-type {kind} depends on which tokens share a micro-batch, "
        f"which HDP decides anew each step: use one of {', '.join(_ROUTING)}."
        for kind in (kinds if isinstance(kinds, list) else [kinds])
        if kind not in _ROUTING
    ]


def _dispatcher(args: Any) -> list[str]:
    kind = args.moe_token_dispatcher_type
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    alone = all((getattr(args, name, None) or 1) == 1 for name in sizes)
    alone = alone and args.tensor_model_parallel_size == 1
    if kind == "alltoall" or alone:
        return []
    return [
        f"--moe-token-dispatcher-type {kind} needs equally many tokens on every rank or is not "
        f"supported with HDP yet: pass --moe-token-dispatcher-type alltoall."
    ]


def _per_micro_batch(args: Any) -> list[str]:
    flags = {
        "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
        "moe_input_jitter_eps": "--moe-input-jitter-eps",
    }
    return [
        f"{flag} {getattr(args, name)} depends on which tokens share a micro-batch, which HDP "
        f"decides anew each step: {_WAY_OUT}."
        for name, flag in flags.items()
        if getattr(args, name, None) is not None
    ]


def _recompute(args: Any) -> list[str]:
    if "moe" not in (getattr(args, "recompute_modules", None) or []):
        return []
    return [
        "--recompute-modules moe would run the router again while another micro-batch is current: "
        "use --recompute-granularity full, or other modules."
    ]
