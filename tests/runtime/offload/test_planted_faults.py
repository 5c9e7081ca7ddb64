# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The tests of offload would see it if it were wrong: each fault here breaks what they check."""

from __future__ import annotations

import pytest
import torch

from megatron_hdp.runtime.offload import ActivationOffload, StaleTensorError
from megatron_hdp.runtime.offload.saved import Block, SavedView
from megatron_hdp.runtime.offload.slabs import HostSlabs
from megatron_hdp.testing.offload import LateTransport
from tests.runtime.offload.stack import Stack, gradients, tokens


def _engine(stack):
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(stack, stack.layers)
    return engine


def _interleaved(stack, x):
    """A forward takes host memory that a prefetch gave back and has not read yet."""
    engine = _engine(stack)
    with engine.activations(1.0) as micro_batch:
        y = stack(x)
    loss = y.square().sum()
    torch.autograd.grad(loss, [*stack.layers[-1].parameters()], retain_graph=True)
    with engine.activations(1.0):
        other = stack(2 * x.detach())
    loss.backward()
    del other
    return gradients(stack, x), micro_batch


@pytest.fixture
def stack():
    return Stack(["plain"] * 5)


@pytest.fixture
def wanted(stack):
    x = tokens(48)
    stack(x).square().sum().backward()
    return gradients(stack, x)


def _right(stack, wanted):
    got, _ = _interleaved(stack, tokens(48))
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_sound_without_a_fault(stack, wanted):
    assert _right(stack, wanted)


def test_a_slab_reused_before_its_copy_back_ends(stack, wanted, monkeypatch):
    free = HostSlabs.free
    none_pending = LateTransport().now()
    monkeypatch.setattr(HostSlabs, "free", lambda self, pieces, _: free(self, pieces, none_pending))
    assert not _right(stack, wanted)


def test_backward_that_does_not_wait_for_its_copy(stack, wanted, monkeypatch):
    fetch = Block.fetch

    def fetch_at_once(self):
        self._transport, transport = _NeverWaits(), self._transport
        try:
            self._transport.device_buffer = transport.device_buffer
            self._transport.to_device = transport.to_device
            return fetch(self)
        finally:
            self._transport = transport

    monkeypatch.setattr(Block, "fetch", fetch_at_once)
    assert not _right(stack, wanted)


class _NeverWaits(LateTransport):
    def wait(self, event):
        pass


def test_memory_freed_before_its_copy_out_ends(stack, wanted, monkeypatch):
    def leave(self):
        source = self._bytes()
        self._storage = None
        for view in self.live_views():
            view.leave_device()
        source.fill_(255)  # as whoever gets the memory next does
        self._account.add(-self.num_bytes)

    monkeypatch.setattr(Block, "leave_device", leave)
    assert not _right(stack, wanted)


def test_a_parameter_offloaded(stack, monkeypatch):
    """Seen by the exact counts of saved bytes, and by an update between forward and backward."""
    _, sound = _interleaved(stack, tokens(48))
    monkeypatch.setattr(ActivationOffload, "fixed_storages", lambda self: set())
    _, faulty = _interleaved(stack, tokens(48))
    weights = sum(p.numel() * 4 for p in stack.layers[0].parameters() if p.dim() == 2)
    difference = faulty.layers[1].saved_bytes - sound.layers[1].saved_bytes
    assert difference >= weights


def test_a_stale_version(monkeypatch):
    def run():
        model = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(3)])
        engine = ActivationOffload(1 << 30, transport=LateTransport())
        engine.watch(model, model)
        x = torch.full((8,), 0.3, requires_grad=True)
        with engine.activations(1.0):
            first = model[0](x)
            y = model[1](first)
            first.detach().mul_(2)
            y = model[2](y)
        y.sum().backward()
        return x.grad

    with pytest.raises(StaleTensorError):
        run()
    monkeypatch.setattr(SavedView, "is_stale", lambda self: False)
    x = torch.full((8,), 0.3, requires_grad=True)
    x.tanh().tanh().tanh().sum().backward()
    assert not torch.equal(run(), x.grad), "the fault is harmless, so the check proves nothing"
