# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Resuming the distributed optimizer over torch's AdamW, which Megatron takes without TE and Apex.

Three faults: two end the run at load, the third resumes with a wrong Adam step, silently.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_hdp.cpu.faults.fault import Fault

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_WHERE = "without TE and Apex, GPUs too"


def _needed() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def _create_missing_state(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _create_state_before_load() -> None:
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
            _create_missing_state(self.optimizer)
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _load_without_grad_and_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        # load_state_dict has set the step already; what comes here is the one from before the load.
        return original(self, model_param, dict(tensors, step=None))

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _give_each_parameter_its_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict


EMPTY_STATE = Fault(
    symbol=f"{_CLASS}.sharded_state_dict",
    seen="AssertionError (len(steps) == 1) at load",
    where=_WHERE,
    needed=_needed,
    handle=_create_state_before_load,
)
LEAF_VIEWS = Fault(
    symbol=f"{_CLASS}._set_main_param_and_optimizer_states",
    seen="a view of a leaf Variable ... in-place operation, at load of fp32 parameters; "
    "the stale step is copied over the restored one",
    where=_WHERE,
    needed=_needed,
    handle=_load_without_grad_and_step,
)
SHARED_STEP = Fault(
    symbol=f"{_CLASS}.load_state_dict",
    seen="nothing: all parameters share one step tensor, so Adam's bias correction is wrong",
    where=_WHERE,
    needed=_needed,
    handle=_give_each_parameter_its_step,
)
