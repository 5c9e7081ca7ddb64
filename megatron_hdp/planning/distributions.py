# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Sequence lengths to plan for: real corpora by their quantiles, the paper's two by its shares."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import PlanError

_K = 1024
# Share of tokens per bin [lower, upper), in K tokens. From 128K up as published (ByteScale, section
# 3.1 and Fig. 4); below, and for the order of the three Byted bins under 2M, the published values
# cannot be told apart by bin: they are assigned so that the text's shares of samples come out too
# (Byted: about 80 % up to 4K, 1 % from 128K, 0.05 % from 2M; scripts/benchmarks/paper/fig04.py).
_TOKEN_SHARES = {
    "github": (
        (0.25, 2, 0.340), (2, 4, 0.114), (4, 8, 0.104), (8, 16, 0.102), (16, 32, 0.088),
        (32, 64, 0.060), (64, 128, 0.030), (128, 256, 0.064), (256, 512, 0.045),
        (512, 1024, 0.030), (1024, 2048, 0.023),
    ),
    "byted": (
        (0.5, 2, 0.076), (2, 4, 0.076), (4, 8, 0.076), (8, 16, 0.076), (16, 32, 0.088),
        (32, 64, 0.095), (64, 128, 0.070), (128, 256, 0.073), (256, 512, 0.097),
        (512, 1024, 0.076), (1024, 2048, 0.076), (2048, 2048.001, 0.121),
    ),
}  # fmt: skip


def names() -> list[str]:
    """All distributions that ship."""
    folder = resources.files("megatron_hdp.planning") / "distributions"
    shipped = [entry.name.removesuffix(".json") for entry in folder.iterdir()]
    return sorted([*shipped, *_TOKEN_SHARES, "lognormal"])


def draw(name: str, tokens: int, longest: int, seed: int) -> NDArray[np.int64]:
    """Sequence lengths of about `tokens` tokens in all, none over `longest`.

    Raises:
        PlanError: there is no such distribution.
    """
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, len(name)])))
    parts, total = [], 0
    while total < tokens:
        lengths = np.minimum(_some(name, random), longest)
        ends = total + np.cumsum(lengths)
        count = int(np.searchsorted(ends, tokens)) + 1
        parts.append(lengths[:count])
        total = int(ends[min(count, len(ends)) - 1])
    return np.concatenate(parts)


def _some(name: str, random: np.random.RandomState) -> NDArray[np.int64]:
    if name in _TOKEN_SHARES:
        return _by_token_share(name, random)
    if name == "lognormal":
        return np.maximum(1, np.exp(random.normal(9.0, 1.5, 4096))).astype(np.int64)
    path = resources.files("megatron_hdp.planning") / "distributions" / f"{name}.json"
    if not path.is_file():
        raise PlanError(f"no length distribution {name}: use one of {', '.join(names())}")
    summary = json.loads(path.read_text())
    at = random.random_sample(4096)
    return np.maximum(1, np.interp(at, summary["p"], summary["lengths"])).astype(np.int64)


def _by_token_share(name: str, random: np.random.RandomState) -> NDArray[np.int64]:
    """Log-uniform inside a bin; bins are drawn by sequences, their token share over mean length."""
    bins = np.asarray(_TOKEN_SHARES[name]) * np.array([_K, _K, 1.0])
    low, high, share = bins.T
    mean = (high - low) / np.log(high / low)
    weights = share / mean
    chosen = random.choice(len(bins), 4096, p=weights / weights.sum())
    where = random.random_sample(4096)
    return np.exp(np.log(low[chosen]) + where * np.log(high / low)[chosen]).astype(np.int64)
