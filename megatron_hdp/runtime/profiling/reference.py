# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A fixed piece of work, to tell a slower machine from a wrong prediction."""

from __future__ import annotations

import statistics
import time

import torch

_TOKENS, _WIDTH, _WORDS, _REPEATS = 512, 128, 2048, 3


def reference_s() -> float:
    """Median CPU seconds of matmuls, causal attention and a softmax, forward and backward.

    Neighbours on a shared machine change what a CPU second is worth by a quarter and more; whoever
    compares with a profile can divide by what this took then (`reference_s` in the file).
    """
    taken = []
    for _ in range(_REPEATS):
        begun = time.process_time()
        _work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def _work() -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        x = torch.randn(_TOKENS, _WIDTH, generator=generator).requires_grad_()
        up = torch.randn(_WIDTH, 4 * _WIDTH, generator=generator).requires_grad_()
        words = torch.randn(_WIDTH, _WORDS, generator=generator).requires_grad_()
        heads = x.view(1, _TOKENS, 4, _WIDTH // 4).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        )
        hidden = attended.transpose(1, 2).reshape(_TOKENS, _WIDTH)
        hidden = torch.nn.functional.gelu(hidden @ up) @ up.t()
        (hidden @ words).log_softmax(-1).mean().backward()
