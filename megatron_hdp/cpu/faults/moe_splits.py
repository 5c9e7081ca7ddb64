# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The MoE dispatcher turns its split sizes into host numbers only where they are on a GPU."""

from __future__ import annotations

import functools
from typing import Any

from megatron_hdp.cpu.faults.fault import Fault


def _needed() -> bool:
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.ones(1), as_numpy=True)
    return torch.is_tensor(moved)


def _handle() -> None:
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        moved = original(tensor, as_numpy=as_numpy, **kwargs)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


FAULT = Fault(
    symbol="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    seen="TypeError: all_to_all_single(): incompatible function arguments, with expert parallelism",
    where="CPU mode",
    needed=_needed,
    handle=_handle,
    cpu_mode_only=True,
)
