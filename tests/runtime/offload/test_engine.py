# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Offload changes where saved bytes wait, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_hdp.planning.values import resident_fraction
from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.runtime.offload.transport import HostTransport
from megatron_hdp.testing.offload import LateTransport
from tests.runtime.offload.stack import LiveBytes, Stack, gradients, tokens

RATIOS = (0, 0.25, 1 / 3, 0.5, 0.7, 1)
MODES = {
    "plain": ["plain"] * 6,
    "selective, reentrant": ["reentrant"] * 6,
    "selective, frames": ["frames"] * 6,
    "full": ["full"] * 6,
    "mixed": ["full", "plain", "frames", "reentrant", "full", "plain"],
    "shared between layers": ["relu"] * 6,
}


def _engine(stack, transport=None, host_bytes=1 << 30):
    engine = ActivationOffload(host_bytes, transport=transport or HostTransport())
    engine.watch(stack, stack.layers)
    return engine


def _plain(stack, x):
    stack(x).square().sum().backward()
    return gradients(stack, x)


def _offloaded(stack, x, engine, ratio):
    with engine.activations(ratio) as micro_batch:
        y = stack(x)
    y.square().sum().backward()
    return gradients(stack, x), micro_batch


def _equal(got, wanted):
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("transport", [HostTransport, LateTransport])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_equal(mode, transport):
    stack, x = Stack(MODES[mode]), tokens(37)
    wanted = _plain(stack, x)
    engine = _engine(stack, transport())
    for ratio in RATIOS:
        got, _ = _offloaded(stack, x, engine, ratio)
        assert _equal(got, wanted), ratio
        assert engine.account.device_bytes == 0
        engine.slabs.settle()
        assert engine.slabs.used_bytes == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_micro_batches_in_flight_in_any_order(order):
    """Three forwards of other ratios and lengths, evaluation between, backward in every order."""
    stack = Stack(MODES["mixed"])
    engine = _engine(stack, LateTransport())
    inputs = [tokens(count, seed) for seed, count in enumerate((37, 5, 61))]
    wanted = [_plain(stack, x) for x in inputs]
    outputs = []
    for x, ratio in zip(inputs, (0.5, 1.0, 0.3), strict=True):
        with engine.activations(ratio):
            outputs.append(stack(x))
        with torch.no_grad(), engine.activations(1.0) as evaluation:
            stack(x)
        assert not any(layer.saved_bytes for layer in evaluation.layers)
    for i in order:
        outputs[i].square().sum().backward()
        outputs[i] = None
        assert _equal(gradients(stack, inputs[i]), wanted[i])
    assert engine.account.device_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_bytes_are_the_ratio_to_one_row(mode):
    stack, x = Stack(MODES[mode]), tokens(64)
    engine = _engine(stack)
    widest_row = 4 * 32 * 4
    for ratio in RATIOS:
        _, micro_batch = _offloaded(stack, x, engine, ratio)
        *others, last = micro_batch.layers
        assert len(micro_batch.layers) == 6
        assert last.offloaded_bytes == 0
        for layer in others:
            assert layer.saved_bytes > 0
            assert abs(layer.offloaded_bytes - ratio * layer.saved_bytes) <= widest_row


@pytest.mark.parametrize("transport", [HostTransport, LateTransport])
@pytest.mark.parametrize("ratio", RATIOS)
def test_device_peak_is_as_eq3_predicts(ratio, transport):
    stack, x = Stack(["plain"] * 12), tokens(256)
    engine = _engine(stack, transport())
    _, micro_batch = _offloaded(stack, x, engine, ratio)
    saved = sum(layer.saved_bytes for layer in micro_batch.layers)
    predicted = float(resident_fraction(ratio, 12)) * saved
    assert micro_batch.device_peak == pytest.approx(predicted, rel=0.05)


def test_the_account_is_the_memory_that_lives():
    """Storages that live after a forward: what the account says, beside what is always there."""
    beside = set()
    for ratio in RATIOS:
        stack, x = Stack(["plain"] * 6), tokens(64)
        engine = _engine(stack)
        with LiveBytes([*stack.parameters(), x]) as live:
            with engine.activations(ratio, keep=[x]):  # held by the caller anyway
                y = stack(x)
            held = engine.slabs.total_bytes
            on_device = live.now - held
            beside.add(on_device - engine.account.device_bytes)
            y.square().sum().backward()
            del y
            gradients(stack, x)
            assert live.now == held
    assert len(beside) == 1, "the account misses memory that offload frees or holds"


def test_200_steps_of_changing_shapes_do_not_grow_the_slabs():
    stack = Stack(["plain"] * 4)
    engine = _engine(stack, LateTransport())
    generator = torch.Generator().manual_seed(0)
    longest = 96
    sizes = []
    for step in range(200):
        count = (
            longest if step == 0 else int(torch.randint(1, longest + 1, (), generator=generator))
        )
        _offloaded(stack, tokens(count, step), engine, 1.0)
        assert engine.account.device_bytes == 0
        sizes.append(engine.slabs.total_bytes)
    assert sizes[0] == sizes[-1]


def test_no_more_host_memory_than_allowed():
    stack, x = Stack(["plain"] * 6), tokens(64)
    wanted = _plain(stack, x)
    generous = _engine(stack)
    _offloaded(stack, x, generous, 1.0)
    limit = generous.totals.offloaded_bytes // 2
    engine = _engine(stack, LateTransport(), host_bytes=limit)
    got, micro_batch = _offloaded(stack, x, engine, 1.0)
    assert _equal(got, wanted)
    assert engine.slabs.total_bytes <= limit
    assert 0 < engine.totals.offloaded_bytes <= limit
    refused = engine.totals.refused_bytes
    assert refused == generous.totals.offloaded_bytes - engine.totals.offloaded_bytes
    assert refused == sum(layer.refused_bytes for layer in micro_batch.layers)


def test_nothing_is_left_of_a_graph_that_is_dropped():
    stack, x = Stack(["plain"] * 6), tokens(64)
    engine = _engine(stack, LateTransport())
    with engine.activations(1.0):
        y = stack(x)
    assert engine.account.device_bytes > 0
    del y
    engine.slabs.settle()
    assert (engine.account.device_bytes, engine.slabs.used_bytes) == (0, 0)


def test_backward_may_run_twice():
    stack, x = Stack(["plain"] * 4), tokens(64)
    wanted = _plain(stack, x)
    engine = _engine(stack, LateTransport())
    with engine.activations(0.7):
        loss = stack(x).square().sum()
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert _equal(gradients(stack, x), wanted)


def test_a_failing_forward_leaves_no_hooks():
    stack, x = Stack(["plain"] * 4), tokens(64)
    engine = _engine(stack)
    with pytest.raises(IndexError), engine.activations(1.0):
        stack.layers[int(stack.layers[0](x)[0, 0].sign()) + 10](x)
    assert engine.account.device_bytes == 0
    with engine.activations(1.0), pytest.raises(RuntimeError, match="nested"):
        engine.activations(0.5).__enter__()
    _offloaded(stack, x, engine, 1.0)


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(ValueError, match=f"offload ratio {ratio}: give a share"):
        _engine(Stack(["plain"])).activations(ratio)
