# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Patches megatron.training.training and the schedule lookup that it calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_hdp.patches.registry import Patch


def _wrap_data_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.iterators import build_hdp_iterators

    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Callable[..., Any]) -> Any:
        return build_hdp_iterators(provider, session.current_session(), original)

    return build_train_valid_test_data_iterators


def _wrap_forward_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session
    from megatron_hdp.runtime.executor import hdp_schedule

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return hdp_schedule(original(*args, **kwargs), session.current_session)

    return get_forward_backward_func


def _wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_hdp.runtime import session

    @functools.wraps(original)
    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        current = session.current_session()
        if current.log_step is not None:
            current.log_step(current, iteration, bool(kwargs.get("is_first_iteration", False)))
        return result

    return training_log


PATCHES = (
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        reason="The balance scheduler sits in the data iterator; with dataloader_type external "
        "there is a seam, but only for scripts that return iterators instead of datasets.",
        parameters=("build_train_valid_test_datasets_provider",),
        wrap=_wrap_data_iterators,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        reason="train_step passes one global number of micro-batches; each rank has its own.",
        parameters=("pp_size", "vp_size", "schedule_pg_collection"),
        wrap=_wrap_forward_backward,
    ),
    Patch(
        target="megatron.training.training:training_log",
        reason="The `hdp:` line follows Megatron's own log line, which stays as it is; nothing is "
        "called after it.",
        parameters=(
            "loss_dict",
            "total_loss_dict",
            "learning_rate",
            "iteration",
            "loss_scale",
            "report_memory_flag",
            "skipped_iter",
            "grad_norm",
            "params_norm",
            "num_zeros_in_grad",
            "max_attention_logit",
            "pg_collection",
            "is_first_iteration",
            "seqlen_squared_sum_in_batch",
            "total_real_tokens_in_batch",
        ),
        wrap=_wrap_training_log,
    ),
)
