# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A plain torch stack without Megatron, and a meter of the memory that really lives."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

HIDDEN = 32


class Layer(torch.nn.Module):
    """Attention and MLP; `mode` says what is recomputed."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)
        self.fc1 = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.fc2 = torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[None] for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y[0])

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reentrant = {"reentrant": True, "frames": False}.get(self.mode)
        if reentrant is None:
            x = x + self.attention(x)
        else:
            x = x + checkpoint(self.attention, x, use_reentrant=reentrant)
        return x + self.mlp(x)


class Stack(torch.nn.Module):
    """Layers by mode: `plain`, `reentrant`, `frames` (torch's other checkpoint), `full`, `relu`.

    `full` checkpoints layers from outside, as Megatron does; `relu` ends each layer with a tensor
    that this layer saves as its output and the next as its input.
    """

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(Layer(mode) for mode in modes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if layer.mode == "full" else layer(x)
            x = torch.relu(x) if layer.mode == "relu" else x
        return x


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """Input [count, HIDDEN] that wants a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator, requires_grad=True)


def gradients(stack: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    """Takes all gradients away."""
    found = [p.grad for p in (*stack.parameters(), x)]
    stack.zero_grad()
    x.grad = None
    return found


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations made and that still live.

    Args:
        beside: tensors that were there before, and do not count.
    """

    def __init__(self, beside: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = 0
        self._beside = {tensor.untyped_storage()._cdata for tensor in beside}
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen or key in self._beside:
            return
        self._seen[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)
