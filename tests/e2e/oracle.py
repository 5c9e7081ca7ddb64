# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Stock Megatron on one process, one sequence a micro-batch: what every plan must reproduce.

Megatron's own attention ([s, b, h], DotProductAttention), RotaryEmbedding, schedule and optimizer;
nothing of HDP but the pack dataset, so that both sides train on the same sequences.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from tests.e2e.harness import BASE, ROOT, SCRIPT, Recorded, record


class _OneSequenceEach:
    """An external loader: every sequence of every step's packs, whole, in order."""

    def __init__(self, dataset, packs_per_step: int, first_step: int = 0) -> None:
        from megatron_hdp.data.sources import source_of

        self._source = source_of(dataset)
        self._packs = packs_per_step
        self._step = first_step
        self._queue: list[dict] = []

    def begin_step(self) -> int:
        first = self._step * self._packs
        self._step += 1
        self._queue = []
        for pack in range(first, first + self._packs):
            for position, length in enumerate(self._source.lengths(pack)):
                piece = self._source.read(pack, position, 0, int(length))
                self._queue.append(
                    {
                        "tokens": torch.from_numpy(piece.tokens)[None],
                        "labels": torch.from_numpy(piece.labels)[None],
                        "loss_mask": torch.from_numpy(piece.loss_mask)[None],
                        "position_ids": torch.arange(int(length))[None],
                        "attention_mask": None,
                    }
                )
        return len(self._queue)

    def __next__(self) -> dict:
        return self._queue.pop(0)


def stock_pretrain(argv: list[str], *, fp64: bool = True, keep_grads: int = 0) -> Recorded:
    """Like harness.pretrain, by stock Megatron. For one forked rank."""
    os.chdir(ROOT)
    sys.argv = [str(SCRIPT), *BASE, "--calculate-per-token-loss", *argv]
    sys.argv += ["--dataloader-type", "external", "--no-create-attention-mask-in-dataloader"]
    _one_micro_batch_a_sequence()
    script = runpy.run_path(str(SCRIPT), run_name="stock")
    return record(lambda: _run(script), fp64, keep_grads)


def _run(script: dict) -> None:
    from megatron.training import get_args

    from megatron_hdp.data.pack_dataset import DocumentPackDataset

    def provider(num_samples):
        script["datasets_provider"].__globals__["GPTDataset"] = DocumentPackDataset
        args = get_args()
        train, valid, test = script["datasets_provider"](num_samples)
        return (
            _OneSequenceEach(train, args.global_batch_size),
            _OneSequenceEach(valid, args.global_batch_size),
            _OneSequenceEach(test, args.global_batch_size),
        )

    provider.is_distributed = True
    script["main"].__globals__["datasets_provider"] = provider
    script["main"]()


def _one_micro_batch_a_sequence() -> None:
    from megatron.training import training

    lookup = training.get_forward_backward_func

    def get_forward_backward_func(*args, **kwargs):
        schedule = lookup(*args, **kwargs)

        def run(*, data_iterator, num_microbatches, **more):
            count = data_iterator.iterable.begin_step()
            return schedule(data_iterator=data_iterator, num_microbatches=count, **more)

        return run

    training.get_forward_backward_func = get_forward_backward_func
