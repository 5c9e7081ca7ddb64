# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Patches megatron.core.utils: batches that are cut already are not broadcast or cut again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hdp.patches.registry import Patch


def _wrap_tp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime.context import batch_on_device, current_micro_batch

    @functools.wraps(original)
    def get_batch_on_this_tp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if current_micro_batch() is None:
            return original(batch, *args, **kwargs)
        absent = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")
        return {**dict.fromkeys((*absent, "hybrid_cp_group")), **batch_on_device()}

    return get_batch_on_this_tp_rank


def _wrap_cp_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime.context import current_micro_batch

    @functools.wraps(original)
    def get_batch_on_this_cp_rank(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return batch if current_micro_batch() is not None else original(batch, *args, **kwargs)

    return get_batch_on_this_cp_rank


PATCHES = (
    Patch(
        target="megatron.core.utils:get_batch_on_this_tp_rank",
        reason="It allocates [micro_batch_size, seq_length] on the other TP ranks; every TP rank "
        "has its own iterator here, with the micro-batch's real number of tokens.",
        parameters=(
            "batch",
            "has_cu_seqlens",
            "is_hybrid_cp",
            "create_attention_mask_in_dataloader",
            "broadcast_src_rank",
            "broadcast_group",
            "cp_size",
            "tp_rank",
            "micro_batch_size",
            "seq_length",
            "mtp_on_this_rank",
            "pipeline_model_parallel_size",
            "is_pipeline_first_stage",
            "is_pipeline_last_stage",
        ),
        wrap=_wrap_tp_rank,
    ),
    Patch(
        target="megatron.core.utils:get_batch_on_this_cp_rank",
        reason="It would cut a rank's own shard again, along the static context-parallel group.",
        parameters=(
            "batch",
            "is_hybrid_cp",
            "cp_group",
            "hybrid_cp_group_func",
            "use_per_sequence_balancing",
        ),
        wrap=_wrap_cp_rank,
    ),
)
