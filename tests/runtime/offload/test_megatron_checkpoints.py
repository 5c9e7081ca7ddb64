# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's CheckpointWithoutOutput, which frees a saved storage and refills it in backward.

Megatron's layers make it with fp8=False, which it takes for FP8 and then needs Transformer Engine;
here it gets None. `tensor_parallel.checkpoint` is tested in training (tests/e2e/test_offload.py).
"""

from __future__ import annotations

import pytest
import torch

from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.testing.offload import LateTransport
from tests.runtime.offload.stack import HIDDEN, Stack, gradients, tokens

VALUE = 4


class _Layer(torch.nn.Module):
    """Norm and MLP as in Megatron's layer with layernorm recompute."""

    mode = "plain"

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.fc1 = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.fc2 = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        recompute = CheckpointWithoutOutput(fp8=None)
        normalised = recompute.checkpoint(self.norm, x)
        y = self.fc2(torch.relu(self.fc1(normalised)))
        recompute.discard_output_and_register_recompute(y)
        return x + y


@pytest.fixture
def stack(megatron_on_cpu, monkeypatch):
    from megatron.core.tensor_parallel import random

    def share_storage(emptied, recomputed):
        """What Megatron's C++ extension does to the storage, without the minute it compiles."""
        storage = emptied.untyped_storage()
        storage.resize_(recomputed.untyped_storage().nbytes())
        storage.copy_(recomputed.untyped_storage())

    monkeypatch.setattr(random, "_get_share_storage", lambda: share_storage)
    stack = Stack([])
    stack.layers.extend([_Layer() for _ in range(5)])
    return stack


@pytest.mark.parametrize("ratio", [0, 1 / 3, 0.7, 1])
def test_its_output_is_neither_moved_nor_counted(stack, ratio):
    x = tokens(48)
    stack(x).square().sum().backward()
    wanted = gradients(stack, x)
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(stack, stack.layers)
    with engine.activations(ratio) as micro_batch:
        y = stack(x)
    y.square().sum().backward()
    got = gradients(stack, x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    inputs_and_relu = 48 * VALUE * (HIDDEN + 2 * HIDDEN)
    for layer in micro_batch.layers[:-1]:
        assert layer.saved_bytes == inputs_and_relu
        assert abs(layer.offloaded_bytes - ratio * inputs_and_relu) <= 2 * HIDDEN * VALUE
