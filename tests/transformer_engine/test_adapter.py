# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The adapter, under Megatron's own wrapper and over real groups, against plain attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.testing.attention import worst_ring_error
from megatron_hdp.testing.virtual_ranks import rank_tensors
from tests.transformer_engine import recorder

HEADS, GROUPS, DIM = 4, 2, 8


def _micro_batches(rings, locals_, num_ranks):
    """One slot. rings: [(ranks, lengths)], disjoint; locals_: rank -> lengths."""
    ids = iter(range(1000))
    found = {rank: (None, ()) for rank in range(num_ranks)}
    for ranks, lengths in rings:
        shared = tuple(Sequence(next(ids), length) for length in lengths)
        found |= {rank: (Ring(tuple(ranks)), shared) for rank in ranks}
    return [
        MicroBatch(
            0, *found[rank], tuple(Sequence(next(ids), n) for n in locals_.get(rank, ()))
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


def _tensors(micro_batches):
    generator = torch.Generator().manual_seed(0)
    sequences = {s for mb in micro_batches for s in (*mb.ring_sequences, *mb.local_sequences)}

    def make(length, count):
        return torch.randn(length, count, DIM, generator=generator, dtype=torch.float64)

    whole = {s.id: tuple(make(s.length, n) for n in (HEADS, GROUPS, GROUPS))
             for s in sorted(sequences)}  # fmt: skip
    return whole, {s.id: make(s.length, HEADS) for s in sorted(sequences)}


def _attention_module(layer_number=1):
    """HDP's class over Megatron's wrapper over the recorder."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hdp.runtime.core_attention import ring_attention_class

    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, calculate_per_token_loss=True,
    )  # fmt: skip
    groups = SimpleNamespace(tp=None, cp=None, hcp=None)
    return ring_attention_class(recorder.install())(
        config, layer_number, AttnMaskType.causal, "self", pg_collection=groups
    )


def _run(micro_batches, whole, gradients, multiple_of=1):
    """(layout, [out, dq, dk, dv], calls) of this rank."""
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_hdp.runtime.attention.te_partition import te_layout
    from megatron_hdp.runtime.attention.transformer_engine import TEMicroBatch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    me, cpu = dist.get_rank(), torch.device("cpu")
    groups = {}
    for micro_batch in micro_batches:  # the same order on all ranks
        if micro_batch.ring is not None and micro_batch.ring not in groups:
            groups[micro_batch.ring] = dist.new_group(list(micro_batch.ring.ranks))
    mine = micro_batches[me]
    layout = te_layout(mine, me, multiple_of=multiple_of)
    group = groups[mine.ring] if mine.ring else None
    params = PackedSeqParams(qkv_format="thd")
    params.hdp = SimpleNamespace(transformer_engine=TEMicroBatch.build(layout, mine, group, cpu))
    q, k, v = (x.requires_grad_() for x in rank_tensors(layout, whole))
    module = _attention_module()
    out = module(q, k, v, None, AttnMaskType.causal, packed_seq_params=params)
    assert module.cp_group is None, "the group of an HDP micro-batch was left in the module"
    rows = [gradients[s][start:stop] for s, start, stop in layout.pieces]
    gradient = torch.cat([*rows, torch.zeros(layout.padding, HEADS, DIM, dtype=q.dtype)])
    grads = torch.autograd.grad(out, (q, k, v), gradient.reshape(len(gradient), -1))
    calls = [call._replace(stream=None) for call in module.calls]
    return layout, [out.detach().reshape(-1, HEADS, DIM), *grads], calls


CASES = {
    "ring of 2 and locals": ([((0, 1), [37])], {0: [5, 1], 1: [9], 2: [13]}, 3),
    "two rings side by side": ([((0, 2), [16, 3]), ((3, 1), [29])], {2: [8]}, 4),
    "non-monotone, shared": ([((2, 0, 1), [41, 7, 12])], {0: [3]}, 3),
    "fewer tokens than ranks": ([((0, 1, 2, 3), [1, 3, 2, 50])], {3: [2]}, 4),
    "a member without a token": ([((0, 1, 2), [1, 2])], {}, 3),
    "local only": ([], {0: [17, 1, 30], 1: [4]}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_parity_in_fp64(megatron_on_cpu, case):
    rings, locals_, num_ranks = CASES[case]
    micro_batches = _micro_batches(rings, locals_, num_ranks)
    whole, gradients = _tensors(micro_batches)
    got = run_ranks(lambda: _run(micro_batches, whole, gradients), num_ranks, timeout_s=60)
    assert worst_ring_error([(layout, x) for layout, x, _ in got], whole, gradients) < 1e-12
    for rank, (layout, _, calls) in enumerate(got):
        mine = micro_batches[rank]
        groups = [call.group_ranks for call in calls]
        ring = [sorted(mine.ring.ranks)] if mine.ring else []
        assert groups == ring + [None] * bool(mine.local_sequences or layout.padding)


def test_padding_for_sequence_parallel(megatron_on_cpu):
    micro_batches = _micro_batches([((0, 1), [37])], {0: [5]}, 2)
    whole, gradients = _tensors(micro_batches)
    got = run_ranks(lambda: _run(micro_batches, whole, gradients, multiple_of=8), 2, timeout_s=60)
    assert all(layout.num_tokens % 8 == 0 for layout, _, _ in got)
    assert worst_ring_error([(layout, x) for layout, x, _ in got], whole, gradients) < 1e-12


def test_lengths_are_the_whole_sequences(megatron_on_cpu):
    micro_batches = _micro_batches([((0, 1, 2), [13, 6])], {1: [9, 2]}, 3)
    whole, gradients = _tensors(micro_batches)
    got = run_ranks(lambda: _run(micro_batches, whole, gradients), 3, timeout_s=60)
    for _, _, calls in got:
        assert calls[0].cu_seqlens == [0, 18, 24]  # 13 -> 18 and 6 -> 6, multiples of 2 x 3
        assert (calls[0].max_seqlen, calls[0].rows) == (18, 8)
    assert got[1][2][1].cu_seqlens == [0, 9, 11]


def test_a_wrong_partition_is_seen(megatron_on_cpu):
    """Ring order instead of the group's: the recorder's numbers must tell."""

    def run():
        from megatron_hdp.runtime.attention import te_partition

        te_partition.sorted = lambda ranks: ranks
        return _run(micro_batches, whole, gradients)

    micro_batches = _micro_batches([((1, 0), [40])], {}, 2)
    whole, gradients = _tensors(micro_batches)
    got = run_ranks(run, 2, timeout_s=60)
    assert worst_ring_error([(layout, x) for layout, x, _ in got], whole, gradients) > 1e-3
