# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Real processes: a transfer is under way while the block before it is computed."""

from __future__ import annotations

from datetime import timedelta

import torch

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.runtime.attention.cpu_flash import CpuFlash
from megatron_hdp.runtime.attention.ring import ring_backward, ring_forward
from megatron_hdp.runtime.communicator import DomainCommunicators
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.sharding import MicroBatchLayout

SIZE = 4


class Recorded(CpuFlash):
    """Writes down when it is called."""

    def __init__(self, events):
        self.events = events

    def forward(self, *args):
        self.events.append(("compute", "kv"))
        return super().forward(*args)

    def backward(self, *args):
        self.events.append(("compute", "kv"))
        return super().backward(*args)


def _record(communicators, events):
    exchange = communicators.exchange

    def recorded(channel, *args, **kwargs):
        events.append(("post", channel))
        transfer = exchange(channel, *args, **kwargs)
        wait = transfer.wait

        def recorded_wait():
            events.append(("wait", channel))
            return wait()

        transfer.wait = recorded_wait
        return transfer

    communicators.exchange = recorded


def _run():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, events = dist.get_rank(), []
    ranks = tuple(range(SIZE))
    communicators = DomainCommunicators.create([ranks], timeout=timedelta(seconds=30))
    _record(communicators, events)
    layout = MicroBatchLayout.build(MicroBatch(0, Ring(ranks), (Sequence(0, 64),), ()), rank)
    state = MicroBatchState.build(
        layout, step=0, slot=0, communicators=communicators, device=torch.device("cpu")
    )
    q, k, v, grad_out = (torch.randn(layout.num_tokens, 1, 16) for _ in range(4))
    kernel = Recorded(events)
    out, lse = ring_forward(q, k, v, state, kernel, 0.25, 1)
    forward = list(events)
    events.clear()
    ring_backward(grad_out, q, k, v, out, lse, state, kernel, 0.25, 1)
    dist.barrier()
    return forward, list(events)


POST, WAIT, COMPUTE = ("post", "kv"), ("wait", "kv"), ("compute", "kv")
SEND_SUM, AWAIT_SUM = ("post", "dkv"), ("wait", "dkv")


def test_the_next_transfer_is_posted_before_a_block_is_computed():
    # The sum of dK and dV that arrives is waited for only after the block that is added to it.
    first = [WAIT, POST, COMPUTE]
    wanted_backward = [POST, COMPUTE, *first, SEND_SUM]
    wanted_backward += [*first, AWAIT_SUM, SEND_SUM] * (SIZE - 3)
    wanted_backward += [WAIT, COMPUTE, AWAIT_SUM, SEND_SUM, AWAIT_SUM]
    for forward, backward in run_ranks(_run, SIZE, timeout_s=60):
        assert forward == [POST, COMPUTE, *first * (SIZE - 2), WAIT, COMPUTE]
        assert backward == wanted_backward
