# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Torch's norms under sequence parallelism: the same training as without it."""

from __future__ import annotations

import pytest
import torch

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import Recorded, gather, pretrain, worst_error

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel",
      "--make-vocab-size-divisible-by", "64"]  # fmt: skip


def _config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    return TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, persist_layer_norm=False,
        **(options | changes),
    )  # fmt: skip


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_is_torchs_norm_with_marked_parameters(megatron_on_cpu, normalization):
    from megatron_hdp.cpu.norm import sequence_parallel_norm

    config = _config(normalization=normalization)
    norm = sequence_parallel_norm(config=config, hidden_size=8, eps=1e-3)
    x = torch.randn(5, 1, 8)
    functional = getattr(
        torch.nn.functional, {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[normalization]
    )
    assert torch.equal(norm(x), functional(x, (8,), eps=1e-3))
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert config.sequence_parallel, "the caller's config is not touched"


def test_no_mark_without_sequence_parallelism(megatron_on_cpu):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = WrappedTorchNorm(config=_config(sequence_parallel=False), hidden_size=8)
    assert not any(parameter.sequence_parallel for parameter in norm.parameters())


def test_what_torchs_norms_cannot_do_is_still_refused(megatron_on_cpu):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        WrappedTorchNorm(config=_config(layernorm_zero_centered_gamma=True), hidden_size=8)


def _train(argv: list[str], *, marked: bool = True) -> Recorded:
    if not marked:
        from megatron_hdp.cpu import norm

        norm._mark = lambda *args: None
    return pretrain([*argv, "--train-iters", "3", "--calculate-per-token-loss"], keep_grads=1)


def test_stock_training_with_and_without_sequence_parallelism(corpus):
    argv = ["--data-path", corpus]
    (alone,) = run_ranks(lambda: _train(argv), 1)
    parallel = run_ranks(lambda: _train([*argv, *SP]), 2)
    assert parallel[0].losses == pytest.approx(alone.losses, rel=1e-6)
    assert worst_error(gather(parallel, "grads"), gather([alone], "grads")) < 1e-12
    assert worst_error(gather(parallel, "params"), gather([alone], "params")) < 1e-11


def test_without_the_mark_gradients_are_wrong(corpus):
    argv = ["--data-path", corpus]
    (alone,) = run_ranks(lambda: _train(argv), 1)
    parallel = run_ranks(lambda: _train([*argv, *SP], marked=False), 2)
    errors = {
        name: abs(parallel[0].grads[0][name] - value).max() / abs(value).max()
        for name, value in alone.grads[0].items()
        if "norm" in name
    }
    assert max(errors.values()) > 0.1
