# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Faults of megatron-core 0.19.2 that show without Transformer Engine, Apex or triton.

Each function handles one, at the upstream symbol that it names.
"""

from __future__ import annotations

import functools
import importlib.util
import queue
import sys
import types
from typing import Any

import torch


def stand_in_for_triton() -> None:
    """megatron.core.transformer.moe.ops.paged_stash imports triton unguarded, from megatron.core.

    Without triton (a CPU-only torch) nothing of Megatron imports.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    name = "megatron.core.transformer.moe.ops.paged_stash"
    module = types.ModuleType(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("moe_paged_stash needs triton: pip install triton, or leave it off.")

    module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    module.paged_stash_copy_kernel = missing  # type: ignore[attr-defined]
    module.paged_stash_pop_kernel = missing  # type: ignore[attr-defined]
    sys.modules[name] = module


def skip_compile_helpers() -> None:
    """megatron.core.datasets.utils.compile_helpers runs make; the wheel has no Makefile.

    It would exit the program, although the wheel's helpers are built already.
    """
    import megatron.core.datasets.utils as utils

    utils.compile_helpers = lambda: None


def use_in_process_write_queue() -> None:
    """filesystem_async.get_write_results_queue spawns a manager that imports __main__ again.

    A synchronous save needs only a queue; the first save then takes 0.3 s instead of 14 s.
    """
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async

    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def create_adam_state_before_load() -> None:
    """DistributedOptimizer.sharded_state_dict(is_loading=True) asserts on an empty torch.Adam."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if is_loading:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if not self.optimizer.state.get(parameter):
                        self.optimizer.state[parameter] = {
                            "step": torch.zeros(()),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def load_states_without_grad_and_step() -> None:
    """DistributedOptimizer._set_main_param_and_optimizer_states, fp32 parameters, torch.Adam.

    It copies in place into views that require grad, and writes the stale local step over the
    restored one; load_state_dict has set the step from the parameter groups already.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, dict(tensors, step=None))

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def unshare_adam_steps() -> None:
    """DistributedOptimizer.load_state_dict gives every parameter the same step tensor.

    torch.Adam then counts it up once per parameter: silently wrong bias correction.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict


def handle_all() -> None:
    """Imports Megatron and handles every fault; call `stand_in_for_triton` before."""
    skip_compile_helpers()
    use_in_process_write_queue()
    create_adam_state_before_load()
    load_states_without_grad_and_step()
    unshare_adam_steps()
