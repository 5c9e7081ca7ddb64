# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rings whose members split heads: plain attention to 1e-12 in fp64, and the bytes they send."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.head_parallel import HeadShape
from megatron_hdp.runtime.attention import function, head_split, ring_attention
from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.runtime.attention.reference import Reference
from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.testing.attention import worst_ring_error
from megatron_hdp.testing.virtual_ranks import (
    VirtualRank,
    rank_tensors,
    run_virtual_ranks,
    virtual_ranks,
    virtual_ring,
)
from tests.runtime.test_ring_attention import CASES, _slot, _tensors

MORE = {
    "ring of 2 and locals": CASES["ring of 2 and locals"],
    "shared ring, one token": CASES["shared ring, one token"],
    "ring of 6": CASES["ring of 6"],
    "ring of 8": CASES["ring of 8"],
    "fewer tokens than 2P": (tuple(range(8)), [1, 3, 20], {2: [4]}, 8),
}


def _split(slot, degree):
    return [dataclasses.replace(mb, head_degree=degree if mb.ring else 1) for mb in _slot(*slot)]


@pytest.mark.parametrize("case", MORE)
def test_virtual_ring_in_fp64(case):
    size, tried = len(MORE[case][0]), 0
    for heads, groups in ((8, 8), (16, 4), (6, 6)):
        for degree in HeadShape(heads, groups, 8).degrees():
            if size % degree:
                continue
            tried += 1
            micro_batches = _split(MORE[case], degree)
            whole, gradients = _tensors(micro_batches, heads, groups, 8)
            sink = torch.linspace(-2, 2, heads, dtype=torch.float64) if degree > 2 else None
            for kernel in (CpuFlash(), Reference()):
                results = virtual_ring(micro_batches, whole, gradients, kernel, sink=sink)
                assert worst_ring_error(results, whole, gradients, sink=sink) < 1e-12
    assert tried >= 3


def test_rows_of_another_member_are_seen():
    micro_batches = _split(((0, 1, 2, 3), [64], {}, 4), 2)
    whole, gradients = _tensors(micro_batches, 4, 4, 8)
    ranks = virtual_ranks(micro_batches, whole, gradients)
    split = ranks[0].state.head_split
    swapped = dataclasses.replace(split, rows=split.rows[::-1])
    ranks[0].state = dataclasses.replace(ranks[0].state, head_split=swapped)
    results = list(
        zip((r.layout for r in ranks), run_virtual_ranks(ranks, CpuFlash()), strict=True)
    )
    assert worst_ring_error(results, whole, gradients) > 1e-3


class _Differentiated(VirtualRank):
    """A virtual rank through autograd, as training runs it."""

    def run(self, kernel, window=None, sink=None):
        inputs = [x.requires_grad_() for x in self.inputs]
        out = ring_attention(*inputs, self.state, kernel=kernel, softmax_scale=1.0,
                             layer_number=1, sink=sink)  # fmt: skip
        out.backward(self.grad_out)
        return [out]


@pytest.mark.parametrize("degree", [1, 2])
def test_only_a_learned_sink_has_its_gradient_computed(monkeypatch, degree):
    calls = []
    for module in (function, head_split):
        real = module.sink_gradient
        monkeypatch.setattr(
            module, "sink_gradient", lambda *x, real=real: calls.append(1) or real(*x)
        )
    for learned in (False, True):
        micro_batches = _split(((0, 1), [64], {0: [5]}, 2), degree)
        ranks = virtual_ranks(micro_batches, *_tensors(micro_batches, 4, 4, 8))
        ranks = [_Differentiated(**vars(rank)) for rank in ranks]
        sink = torch.zeros(4, dtype=torch.float64, requires_grad=learned)
        run_virtual_ranks(ranks, CpuFlash(), sink=sink)
        # One per rank; where heads are split, rank 0's local sequence has one of its own.
        assert len(calls) == (degree + 1 if learned else 0)
    assert sink.grad.abs().min() > 0


def test_what_was_exchanged_is_let_go_before_the_short_ring(monkeypatch):
    micro_batches = _split(((0, 1, 2, 3), [64], {}, 4), 2)
    ranks = virtual_ranks(micro_batches, *_tensors(micro_batches, 4, 4, 8))
    kept, checked = {}, []
    for rank in ranks:
        communicators = rank.state.communicators

        def exchange_all(
            channel, sent, received, *, label, rank=rank, real=communicators.exchange_all
        ):
            buffers = [buffer for _, buffer in (*sent, *received)]
            kept[id(rank.state.head_split.shared)] = [weakref.ref(buffer) for buffer in buffers]
            return real(channel, sent, received, label=label)

        monkeypatch.setattr(communicators, "exchange_all", exchange_all)

    def checking(real):
        def ring(*given):
            (state,) = (x for x in given if id(x) in kept)
            checked.extend(reference() is None for reference in kept[id(state)])
            return real(*given)

        return ring

    for name in ("ring_forward", "ring_backward"):
        monkeypatch.setattr(head_split, name, checking(getattr(head_split, name)))
    run_virtual_ranks(ranks, CpuFlash())
    assert len(checked) == 4 * 2 * 2
    assert all(checked)


def test_heads_that_the_degree_does_not_divide_end_in_one_sentence():
    micro_batches = _split(((0, 1, 2, 3), [64], {}, 4), 4)
    rank = virtual_ranks(micro_batches, *_tensors(micro_batches, 8, 2, 8))[0]
    sentence = "8 query and 2 key/value heads, which 4 ring members .*pass --hdp-head-parallel off"
    with pytest.raises(RuntimeError, match=sentence):
        ring_attention(*rank.inputs, rank.state, kernel=CpuFlash(), softmax_scale=1.0,
                       layer_number=3)  # fmt: skip


@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (16, 4)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_sent_are_the_formulas(heads, groups, size):
    shape = HeadShape(heads, groups, head_dim=16, value_bytes=8)
    for degree in (1, *(u for u in shape.degrees() if size % u == 0)):
        micro_batches = _split((range(size), [16 * size, 48 * size], {0: [5]}, size), degree)
        whole, gradients = _tensors(micro_batches, heads, groups, 16)
        ranks = virtual_ranks(micro_batches, whole, gradients)
        run_virtual_ranks(ranks, CpuFlash())
        sent = [rank.state.communicators.bytes_sent for rank in ranks]
        assert sent == [64 * shape.sent_bytes(size, degree)] * size


SLOTS = [
    (((0, 1, 2, 3), [133, 1, 6], {0: [5, 1], 2: [9]}, 4), degree) for degree in (2, 4)
] + [(((2, 0), [41], {0: [3], 1: [8], 3: [2]}, 4), 2)]  # fmt: skip
SINK = torch.linspace(-2, 2, 8, dtype=torch.float64)


@pytest.mark.parametrize("groups", [8, 4])
def test_real_processes_over_gloo(groups):
    """One slot after another; in the second, layers are computed again in backward."""
    slots = [_split(slot, degree) for slot, degree in SLOTS]
    tensors = [_tensors(slot, 8, groups, 16) for slot in slots]

    def run():
        from datetime import timedelta

        import torch.distributed as dist
        from torch.utils.checkpoint import checkpoint

        from megatron_hdp.runtime.attention import ring_attention
        from megatron_hdp.runtime.communicator import DomainCommunicators
        from megatron_hdp.runtime.micro_batch import MicroBatchState

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        communicators = DomainCommunicators.create([range(4)], timeout=timedelta(seconds=30))
        results = []
        for number, (slot, (whole, gradients)) in enumerate(zip(slots, tensors, strict=True)):
            layout = MicroBatchLayout.build(slot[rank], rank, multiple_of=4)
            inputs = [x.requires_grad_() for x in rank_tensors(layout, whole)]
            inputs.append(SINK.clone().requires_grad_())
            state = MicroBatchState.build(
                layout, step=0, slot=number, communicators=communicators,
                device=torch.device("cpu"),
            )  # fmt: skip

            def attend(q, k, v, sink, state=state):
                return ring_attention(q, k, v, state, kernel=CpuFlash(), softmax_scale=0.25,
                                      layer_number=1, sink=sink)  # fmt: skip

            out = checkpoint(attend, *inputs, use_reentrant=False) if number else attend(*inputs)
            rows = [gradients[s][start:stop] for s, start, stop in layout.pieces]
            grad_out = torch.cat([*rows, torch.zeros(layout.padding, 8, 16).double()])
            grads = torch.autograd.grad(out, inputs, grad_out)
            results.append((layout, [x.detach() for x in (out, *grads)]))
        return results

    found = run_ranks(run, 4, timeout_s=100)
    for number, (whole, gradients) in enumerate(tensors):
        results = [rank[number] for rank in found]
        assert worst_ring_error(results, whole, gradients, sink=SINK) < 1e-12


def test_a_member_that_does_not_come_is_named():
    (micro_batches,) = [_split(((0, 1), [41], {}, 2), 2)]
    whole, _ = _tensors(micro_batches, 2, 2, 8)

    def run():
        import time
        from datetime import timedelta

        import torch.distributed as dist

        from megatron_hdp.runtime.attention import ring_attention
        from megatron_hdp.runtime.communicator import DomainCommunicators
        from megatron_hdp.runtime.micro_batch import MicroBatchState

        dist.init_process_group("gloo")
        communicators = DomainCommunicators.create([(0, 1)], timeout=timedelta(seconds=2))
        if dist.get_rank() == 1:
            time.sleep(6)
            return ""
        layout = MicroBatchLayout.build(micro_batches[0], 0)
        state = MicroBatchState.build(
            layout, step=7, slot=3, communicators=communicators, device=torch.device("cpu")
        )
        try:
            ring_attention(*rank_tensors(layout, whole), state, kernel=CpuFlash(),
                           softmax_scale=1.0, layer_number=2)  # fmt: skip
        except RuntimeError as error:
            return str(error)
        return "no error"

    message = run_ranks(run, 2, timeout_s=60)[0]
    for word in ("HDP rank 1", "step 7", "slot 3", "layer 2", "heads forward", "ring (0, 1)"):
        assert word in message
