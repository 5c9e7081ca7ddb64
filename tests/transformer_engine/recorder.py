# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Takes the place of Transformer Engine's DotProductAttention, which needs a GPU to be imported.

Its signatures and attributes are compared with the real wheel's source (test_contract.py). It
computes exact attention with Transformer Engine's own partition over the real process group, so a
wrong group, order, length or row is a wrong number or a hang, as it would be there. Around it runs
Megatron's real TEDotProductAttention, taken from the installed file.
"""

from __future__ import annotations
import __future__

import ast
import inspect
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from packaging.version import Version

TE_VERSION = "2.20.2"


class Call(NamedTuple):
    """What one forward was given."""

    group_ranks: list[int] | None
    stream: object
    cu_seqlens: list[int]
    max_seqlen: int
    rows: int
    layer: int


class DotProductAttention(torch.nn.Module):
    """Keyword for keyword what Megatron's wrapper uses of transformer_engine's class."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        self.heads, self.layer_number = num_attention_heads, layer_number
        self.softmax_scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type
        self.calls: list[Call] = []

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        pad_between_seqs=None,
    ):
        cu = cu_seqlens_q
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert all(x is cu for x in (cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded))
        assert not pad_between_seqs
        assert cu.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_kv == int(cu.diff().max())
        assert all(x.is_contiguous() for x in (query_layer, key_layer, value_layer))
        group = self.cp_group
        ranks = None
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            assert self.cp_global_ranks == ranks
            assert self.cp_stream is not None
            assert self.cp_comm_type == "p2p"
        size = 1 if group is None else dist.get_world_size(group)
        lengths = cu.diff().tolist()
        assert size == 1 or all(length % (2 * size) == 0 for length in lengths)
        assert len(query_layer) == len(key_layer) == len(value_layer) == sum(lengths) // size
        self.calls.append(
            Call(ranks, self.cp_stream, cu.tolist(), max_seqlen_q, len(query_layer),
                 self.layer_number)
        )  # fmt: skip
        if size > 1:
            key_layer, value_layer = (_Gather.apply(x, group) for x in (key_layer, value_layer))
        rank = 0 if size == 1 else dist.get_rank(group)
        out = _attend(query_layer, key_layer, value_layer, lengths, size, rank, self.softmax_scale)
        return out.reshape(len(out), -1)


class _Gather(torch.autograd.Function):
    """[t, h, d] of every rank of a group, one behind the other; equal shapes."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.rows
        return gradient[first : first + ctx.rows], None


def rank_indices(lengths, size, rank):
    """Rows of the whole padded pack that a rank holds, in its order (DualChunkSwap)."""
    if size == 1:
        return torch.arange(sum(lengths))
    rows, at = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            rows.append(torch.arange(at + part * chunk, at + (part + 1) * chunk))
        at += length
    return torch.cat(rows)


def _attend(q, k, v, lengths, size, rank, scale):
    """Causal attention of this rank's rows against the gathered K and V."""
    of_rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    here = rank_indices(lengths, size, rank)
    there = torch.cat([rank_indices(lengths, size, r) for r in range(size)])
    seen = (of_rows[here][:, None] == of_rows[there]) & (there <= here[:, None])
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def megatron_wrapper(base=DotProductAttention) -> type:
    """The installed Megatron's own TEDotProductAttention, compiled over `base`."""
    from megatron.core.extensions import transformer_engine

    tree = ast.parse(inspect.getsource(transformer_engine))
    (node,) = (
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "TEDotProductAttention"
    )
    names = dict(
        vars(transformer_engine),
        te=SimpleNamespace(pytorch=SimpleNamespace(DotProductAttention=base)),
        HAVE_TE=True,
        get_te_version=lambda: Version(TE_VERSION),
        is_te_min_version=lambda version, check_equality=True: True,
    )
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([node], []), transformer_engine.__file__, "exec", flags), names)
    return names["TEDotProductAttention"]


def install() -> type:
    """Puts the wrapper where a layer spec and HDP look for it; for the life of the process."""
    from megatron.core.models import backends

    from megatron_hdp.runtime import te_core_attention

    wrapper = megatron_wrapper()
    te_core_attention.te_core_attention = lambda: wrapper
    backends.LocalSpecProvider.core_attention = lambda self: wrapper
    return wrapper
