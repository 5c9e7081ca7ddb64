# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Attention written out, for fp64 comparisons and for devices without a kernel."""

from __future__ import annotations

import torch

from megatron_hdp.runtime.attention.cpu_flash import hidden_keys, sequences
from megatron_hdp.runtime.micro_batch import VarlenArguments


class Reference:
    """plain matrix products; any device and dtype, slow"""

    name = "reference"

    @staticmethod
    def version() -> str | None:
        return None

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    @staticmethod
    def window_refusal() -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device)
        for rows, columns in sequences(arguments):
            hidden = hidden_keys(q[rows], k[columns], causal, arguments.window)
            scores = _scores(q[rows].to(wide), k[columns].to(wide), hidden, scale)
            lse[:, rows] = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse[:, rows, None])
            values = _expand(v[columns].to(wide), q.shape[1])
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        arguments: VarlenArguments,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, columns in sequences(arguments):
            do, qs, ks, vs = (x.to(wide) for x in (grad_out[rows], q[rows], k[columns], v[columns]))
            hidden = hidden_keys(qs, ks, causal, arguments.window)
            weights = torch.exp(_scores(qs, ks, hidden, scale) - lse[:, rows, None].to(wide))
            delta = (do * out[rows].to(wide)).sum(-1).T
            dweights = torch.einsum("qhd,khd->hqk", do, _expand(vs, q.shape[1]))
            dscores = weights * (dweights - delta[..., None]) * scale
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, _expand(ks, q.shape[1])).to(dq.dtype)
            dk[columns] = _sum_groups(torch.einsum("hqk,qhd->khd", dscores, qs), k)
            dv[columns] = _sum_groups(torch.einsum("hqk,qhd->khd", weights, do), v)
        return dq, dk, dv


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[q, h, d], [k, g, d] -> [h, q, k], with -inf where hidden."""
    scores = torch.einsum("qhd,khd->hqk", q, _expand(k, q.shape[1])) * scale
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, g, d] -> [s, h, d]: query head h reads group h // (h/g)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[s, h, d] -> [s, g, d], summed over the heads of a group."""
    groups = like.shape[1]
    return x.unflatten(1, (groups, x.shape[1] // groups)).sum(2).to(like.dtype)
