# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Patches megatron.core.parallel_state: the DP x CP group becomes the HDP domain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_hdp.patches.registry import Patch


def _wrap_initialize_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.domain import create_domain

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        current = session.current_session()
        current.domain = create_domain(timedelta(minutes=current.options.timeout_minutes))

    return initialize_model_parallel


PATCHES = (
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        reason="The ring communicators are made once, by all ranks in one order, right after "
        "Megatron's own groups; there is no hook after their creation.",
        parameters=(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_comm_backend",
            "use_sharp",
            "context_parallel_size",
            "hierarchical_context_parallel_sizes",
            "hybrid_context_parallel",
            "expert_model_parallel_size",
            "gtp_remat_size",
            "expert_gtp_remat_size",
            "num_distributed_optimizer_instances",
            "expert_tensor_parallel_size",
            "nccl_communicator_config_path",
            "distributed_timeout_minutes",
            "order",
            "get_embedding_ranks",
            "get_position_embedding_ranks",
            "create_gloo_process_groups",
            "high_priority_stream_groups",
            "sharp_enabled_group",
            "rank_offset",
            "local_world_size",
        ),
        wrap=_wrap_initialize_model_parallel,
    ),
)
