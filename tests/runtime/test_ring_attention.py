# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Ring attention against plain attention of whole sequences, in fp64 to 1e-12."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.runtime.attention.reference import Reference
from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.runtime.windows import windowed_calls
from megatron_hdp.testing.attention import worst_ring_error
from megatron_hdp.testing.virtual_ranks import rank_tensors, virtual_ring


def _slot(ring_ranks, ring_lengths, local_lengths, num_ranks):
    """One slot: a ring over `ring_ranks`, and rank r's local sequences in local_lengths[r]."""
    ids = iter(range(10_000))
    shared = tuple(Sequence(next(ids), length) for length in ring_lengths)
    ring = Ring(tuple(ring_ranks)) if ring_ranks else None
    return [
        MicroBatch(
            0,
            ring if ring and rank in ring.ranks else None,
            shared if ring and rank in ring.ranks else (),
            tuple(Sequence(next(ids), length) for length in local_lengths.get(rank, ())),
        )
        for rank in range(num_ranks)
    ]


def _tensors(micro_batches, heads, groups, dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sequences = {s for mb in micro_batches for s in (*mb.ring_sequences, *mb.local_sequences)}

    def make(length, count):
        return torch.randn(length, count, dim, generator=generator, dtype=torch.float64).to(dtype)

    whole, gradients = {}, {}
    for sequence in sorted(sequences):
        whole[sequence.id] = tuple(make(sequence.length, n) for n in (heads, groups, groups))
        gradients[sequence.id] = make(sequence.length, heads)
    return whole, gradients


CASES = {
    "ring of 2 and locals": ((0, 1), [37], {0: [5, 1], 1: [9], 2: [13]}, 3),
    "non-monotone ring": ((3, 0, 2), [41, 7], {1: [8], 0: [3]}, 4),
    "shared ring, one token": ((0, 1, 2, 3), [1, 64, 3], {3: [2]}, 4),
    "fewer tokens than 2P": ((0, 1, 2, 3, 4), [3, 9, 2], {0: [4], 2: [1]}, 5),
    "ring of 6": ((5, 1, 4, 0, 2, 3), [50, 11], {3: [1]}, 6),
    "ring of 7": (tuple(range(7)), [95], {}, 7),
    "ring of 8": (tuple(range(8)), [133], {r: [r + 1] for r in range(8)}, 8),
    "ring of 16": (tuple(range(16)), [97, 300], {}, 16),
    "local only": ((), [], {0: [17, 1, 30]}, 1),
}


SHAPES = [(2, 2, 64), (8, 2, 96), (8, 1, 128)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "groups", "dim"), [*SHAPES, (4, 4, 13)])
def test_virtual_ring_in_fp64(case, heads, groups, dim):
    micro_batches = _slot(*CASES[case])
    whole, gradients = _tensors(micro_batches, heads, groups, dim)
    for kernel in (CpuFlash(), Reference()):
        results = virtual_ring(micro_batches, whole, gradients, kernel)
        assert worst_ring_error(results, whole, gradients) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_virtual_ring_with_windows_and_sinks_in_fp64(case):
    micro_batches = _slot(*CASES[case])
    whole, gradients = _tensors(micro_batches, 8, 2, 8)
    sink = torch.linspace(-2, 2, 8, dtype=torch.float64)
    for kernel in (CpuFlash(), Reference()):
        for window, kind in ((None, sink), (1, None), (7, sink), (40, None), (1000, sink)):
            soft = {"window": window, "sink": kind}
            results = virtual_ring(micro_batches, whole, gradients, kernel, **soft)
            assert worst_ring_error(results, whole, gradients, **soft) < 1e-12
    wrong = dict(soft, window=6)  # a window that is one too small, where one bites
    results = virtual_ring(micro_batches, whole, gradients, kernel, window=7, sink=sink)
    assert worst_ring_error(results, whole, gradients, **wrong) > 1e-3


def test_a_window_skips_what_is_outside_it():
    layout = MicroBatchLayout.build(_slot((0, 1, 2, 3), [8000], {}, 4)[1], 1)
    calls = windowed_calls(layout, 100)
    # Only neighbours among the 8 chunks meet: chunk 0 before 1, chunk 5 before 6.
    assert [len(hop) for hop in calls.blocks] == [0, 1, 0, 1]
    staircase = calls.blocks[1][0].boundaries
    assert (staircase.max_q, staircase.max_k, staircase.window) == (100, 100, 0)
    # Chunk 0's last rows come from member 0, chunk 5's from member 2; chunk 1's go there, 6's to 0.
    assert calls.received == (0, 100, 0, 100)
    assert calls.sent == (None, slice(900, 1000), None, slice(1900, 2000))


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("window", [0, 1, 30, 100, 250, 5000])
def test_what_a_member_receives_is_what_the_other_sends(size, window):
    """And of three sequences on one ring, just the rows that some row of the member sees."""
    slot = _slot(range(size), [1000, 64, 777], {}, size)
    layouts = [MicroBatchLayout.build(mb, rank) for rank, mb in enumerate(slot)]
    calls = [windowed_calls(layout, window) for layout in layouts]
    for member, layout in enumerate(layouts):
        for hop in range(1, size):
            rows = calls[member].sent[hop]
            places = np.arange(layout.ring_tokens)[slice(0) if rows is None else rows]
            behind = (member + hop) % size
            assert calls[behind].received[hop] == len(places)
            assert {_token(layout, row) for row in places} == {
                (sequence, token)
                for sequence, token in (_token(layout, row) for row in range(layout.ring_tokens))
                if any(
                    sequence == other and max(token, first) <= min(end - 1, token + window)
                    for other, first, end in layouts[behind].pieces
                )
            }


def _token(layout, row):
    for sequence, first, end in layout.pieces:
        if row < end - first:
            return sequence, first + row
        row -= end - first
    raise AssertionError("no such row")


@pytest.mark.parametrize(("heads", "groups", "dim"), SHAPES)
def test_virtual_ring_in_bf16_is_as_good_as_one_call(heads, groups, dim):
    """The ring's error against fp64 beside that of single kernel calls on whole sequences."""
    slots = [*CASES.values(), ((0, 1, 2, 3), [512], {}, 4)]
    for slot in slots:
        ring = _slot(*slot)
        whole, gradients = _tensors(ring, heads, groups, dim, torch.bfloat16)
        sequences = {s for mb in ring for s in (*mb.ring_sequences, *mb.local_sequences)}
        calls = [MicroBatch(0, None, (), tuple(sorted(sequences)))]
        ring_error, call_error = (
            worst_ring_error(virtual_ring(mbs, whole, gradients, CpuFlash()), whole, gradients)
            for mbs in (ring, calls)
        )
        assert ring_error < 2 * call_error


def test_a_wrong_token_is_seen():
    micro_batches = _slot((0, 1), [37], {}, 2)
    whole, gradients = _tensors(micro_batches, 4, 2, 8)
    results = virtual_ring(micro_batches, whole, gradients, CpuFlash())
    whole[0][1][20] += 1e-6
    assert worst_ring_error(results, whole, gradients) > 1e-9


GLOO = {
    "non-monotone ring": {},
    "fewer tokens than 2P": {},
    "shared ring, one token": {"window": 12, "sink": torch.linspace(-2, 2, 8, dtype=torch.float64)},
}


@pytest.mark.parametrize("case", GLOO)
def test_real_processes_over_gloo(case):
    micro_batches = _slot(*CASES[case])
    whole, gradients = _tensors(micro_batches, 8, 2, 16)

    soft = GLOO[case]

    def run():
        from datetime import timedelta

        import torch.distributed as dist

        from megatron_hdp.runtime.attention import ring_attention
        from megatron_hdp.runtime.communicator import DomainCommunicators
        from megatron_hdp.runtime.micro_batch import MicroBatchState

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        world = [tuple(range(dist.get_world_size()))]
        communicators = DomainCommunicators.create(world, timeout=timedelta(seconds=30))
        layout = MicroBatchLayout.build(micro_batches[rank], rank)
        tensors = [x.requires_grad_() for x in rank_tensors(layout, whole)]
        state = MicroBatchState.build(
            layout, step=0, slot=0, communicators=communicators, device=torch.device("cpu")
        )
        tensors += [x.clone().requires_grad_() for key, x in soft.items() if key == "sink"]
        out = ring_attention(
            *tensors[:3], state, kernel=CpuFlash(), softmax_scale=0.25, layer_number=1,
            window=soft.get("window"), sink=tensors[3] if "sink" in soft else None,
        )  # fmt: skip
        rows = [gradients[s][start:stop] for s, start, stop in layout.pieces]
        grads = torch.autograd.grad(out, tensors, torch.cat(rows))
        return layout, [x.detach() for x in (out, *grads)]

    results = run_ranks(run, len(micro_batches), timeout_s=60)
    assert worst_ring_error(results, whole, gradients, **soft) < 1e-12


def test_a_missing_peer_ends_in_one_sentence():
    def run():
        from datetime import timedelta

        import torch.distributed as dist

        from megatron_hdp.runtime.communicator import DomainCommunicators, TransferLabel

        dist.init_process_group("gloo")
        communicators = DomainCommunicators.create([(0, 1)], timeout=timedelta(seconds=2))
        if dist.get_rank() == 1:
            import time

            time.sleep(6)
            return ""
        label = TransferLabel(7, 3, 2, "forward", 1, (0, 1))
        transfer = communicators.exchange(
            "kv", torch.ones(4), torch.empty(4), to=1, source=1, label=label
        )
        try:
            transfer.wait()
        except RuntimeError as error:
            return str(error)
        return "no error"

    message = run_ranks(run, 2, timeout_s=60)[0]
    for word in ("step 7", "slot 3", "layer 2", "forward", "ring (0, 1)", "HDP rank 1"):
        assert word in message
