# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What autograd saves: which of it moves, and that what comes back is what was saved."""

from __future__ import annotations

import pytest
import torch

from megatron_hdp.runtime.offload import ActivationOffload, StaleTensorError
from megatron_hdp.runtime.offload.selection import choose, granule
from megatron_hdp.testing.offload import LateTransport


class _Keep(torch.autograd.Function):
    """y = 2 x, which saves what it is told to and checks it in backward."""

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        ctx.wanted = [t.clone() for t in saved]
        ctx.strides = [t.stride() for t in saved]
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        got = ctx.saved_tensors
        for tensor, wanted in zip(got, ctx.wanted, strict=True):
            assert torch.equal(tensor, wanted)
            if not isinstance(tensor, torch.nn.Parameter):
                tensor.data = torch.empty(0)  # as Transformer Engine frees what it has read
        again = ctx.saved_tensors
        assert all(torch.equal(t, w) for t, w in zip(again, ctx.wanted, strict=True))
        return (grad * 2, *[None] * len(got))


class _Subclass(torch.Tensor):
    pass


SINE = 16
"""Bytes that the first layer saves besides."""


class _Layers(torch.nn.Module):
    """The first layer saves the given tensors, and more layers follow, so that it moves."""

    def __init__(self, make):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
        self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
        self.make = make

    def forward(self, x):
        x = _Keep.apply(self.layers[0](x).sin(), *self.make(self))
        return self.layers[2](self.layers[1](x).sin()).cos()


def _run(make, ratio=1.0, between=lambda: None):
    """Forward and backward; returns the first layer's counts."""
    model = _Layers(make)
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(model, model.layers)
    x = torch.ones(4, requires_grad=True)
    with engine.activations(ratio) as micro_batch:
        y = model(x)
    between()
    y.sum().backward()
    del y
    assert engine.account.device_bytes == 0
    return micro_batch.layers[0]


def _values(*shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()) % 120).to(dtype).reshape(shape)


def _marked(name):
    tensor = _values(8, 8)
    setattr(tensor, name, True)
    return tensor


def _several_views():
    whole = _values(6, 12)
    return [whole, whole.t(), whole.view(2, 3, 12), whole[:, None]]


def _slices():
    whole = _values(6, 12)
    return [whole[:, :4], whole[:, 4:8], whole[:, 8:]]


CASES = {
    "one": (lambda m: [_values(8, 8)], 256),
    "the same twice": (lambda m: [t := _values(8, 8), t], 256),
    "views of one storage": (lambda m: _several_views(), 288),
    "slices that cover their storage": (lambda m: _slices(), 288),
    "a slice of a large storage": (lambda m: [_values(64, 64)[:, 3:7]], 1024),
    "overlapping slices": (lambda m: [(w := _values(99))[:20], w[10:30]], 160),
    "transposed": (lambda m: [_values(6, 12).t()], 288),
    "expanded": (lambda m: [_values(1, 64).expand(5, 64)], 256),
    "half precision": (lambda m: [_values(8, 8, dtype=torch.bfloat16)], 128),
    "fp8 parts": (lambda m: [_values(64, dtype=torch.uint8), _values(8)], 96),
    "integers": (lambda m: [_values(16, dtype=torch.int64)], 128),
    "a parameter": (lambda m: [m.weight], 0),
    "a view of a parameter": (lambda m: [m.weight.t(), m.weight.detach()[2:]], 0),
    "empty": (lambda m: [torch.empty(0, 8)], 0),
    "marked by Transformer Engine": (lambda m: [_marked("_TE_do_not_offload")], 0),
    "marked by Megatron": (lambda m: [_marked("_do_not_offload")], 0),
    "a subclass": (lambda m: [_values(8, 8).as_subclass(_Subclass)], 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_comes_back_as_it_was(case, ratio):
    make, saved_bytes = CASES[case]
    layer = _run(make, ratio)
    assert layer.saved_bytes == saved_bytes + SINE
    assert abs(layer.offloaded_bytes - ratio * layer.saved_bytes) <= 128
    assert ratio < 1 or layer.offloaded_bytes == layer.saved_bytes


def test_memory_that_megatron_empties_and_refills():
    """CheckpointWithoutOutput frees a storage in forward and fills the same one in backward."""
    tensor = _values(8, 8)

    def make(model):
        return [tensor]

    class Empty(torch.nn.Module):
        def forward(self, x):
            tensor.untyped_storage().resize_(0)
            return x

    def refill():
        tensor.untyped_storage().resize_(256)
        tensor.untyped_storage().copy_(_values(8, 8).untyped_storage())

    model = _Layers(make)
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(model, model.layers)
    with engine.activations(1.0) as micro_batch:
        x = torch.ones(4, requires_grad=True)
        x = _Keep.apply(model.layers[0](x).sin(), *make(model))
        y = model.layers[1](Empty()(x)).sin()
    refill()
    y.sum().backward()
    assert micro_batch.layers[0].saved_bytes == SINE


@pytest.mark.parametrize("when", ["in its layer", "while it is copied", "kept, at any time"])
def test_a_change_in_place_is_an_error(when):
    """Without hooks autograd raises; with them it looks at nothing, so the engine must."""
    model = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(3)])
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(model, model)
    with engine.activations(1.0):
        first = model[0](torch.ones(8, requires_grad=True))
        if when == "in its layer":
            first.detach().mul_(2)
        y = model[1](first)
        if when == "while it is copied":
            first.detach().mul_(2)
        y = model[2](y)
        if when == "kept, at any time":
            y.detach().mul_(2)
    with pytest.raises(StaleTensorError, match=r"float32\[8\] was changed in place .* a copy"):
        y.sum().backward()


def test_a_change_after_the_copy_harms_nothing():
    model = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(4)])
    engine = ActivationOffload(1 << 30, transport=LateTransport())
    engine.watch(model, model)
    x = torch.full((8,), 0.3, requires_grad=True)
    model(x).sum().backward()
    wanted, x.grad = x.grad, None
    with engine.activations(1.0):
        first = model[0](x)
        y = model[3](model[2](model[1](first)))
        first.detach().mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)


def test_granules():
    assert granule((1, 100, 1, 64), 2) == 128
    assert granule((7,), 4) == 4
    assert granule((16, 4096), 2) == 512


@pytest.mark.parametrize(
    ("sizes", "ratio", "wanted"),
    [
        ([10, 40, 20], 1.0, [10, 40, 20]),
        ([10, 40, 20], 0.0, [0, 0, 0]),
        ([10, 40, 30], 0.5, [0, 40, 0]),
        ([100, 10, 12], 0.5, [40, 10, 12]),  # the one that is cut is the only one left
        ([40, 60, 50], 0.5, [16, 60, 0]),  # the smallest is cut
        ([64], 0.3, [20]),
    ],
)
def test_whole_tensors_first_and_one_cut(sizes, ratio, wanted):
    assert choose(sizes, [2] * len(sizes), ratio) == wanted
