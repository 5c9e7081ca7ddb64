# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own attention, a process group per ring (not yet run on a GPU)

Source: transformer_engine.pytorch.DotProductAttention of 2.9 and later, called through Megatron's
TEDotProductAttention, which takes the group from PackedSeqParams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from packaging.version import Version

from megatron_hdp.planning.values import MicroBatch
from megatron_hdp.runtime.attention.te_partition import PaddedCall, local_call, ring_call
from megatron_hdp.runtime.attention.torch_flash import import_refusal, installed_version
from megatron_hdp.runtime.micro_batch import on_device
from megatron_hdp.runtime.sharding import MicroBatchLayout

OLDEST = "2.9"
"""Before it, groups that change from micro-batch to micro-batch may not converge (upstream)."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams], torch.Tensor]


def version() -> str | None:
    """The installed Transformer Engine's version."""
    return installed_version("transformer-engine")


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot do these inputs, in a phrase, else None. It pads head dims itself."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}: pass --bf16"
    reason = import_refusal("transformer_engine.pytorch", "Transformer Engine")
    if reason is not None:
        return reason
    found = version()
    if found is not None and Version(found) < Version(OLDEST):
        return f"Transformer Engine {found} is older than {OLDEST}"
    return None


@dataclass(frozen=True)
class TECall:
    """One call of its attention: parameters made once, used by every layer."""

    params: PackedSeqParams
    num_rows: int
    rows: torch.Tensor | None
    """int64; see `PaddedCall.rows`."""

    @classmethod
    def build(
        cls, call: PaddedCall, group: dist.ProcessGroup | None, device: torch.device
    ) -> TECall:
        cu_seqlens = on_device(device, call.cu_seqlens)
        # One object four times, and pad_between_seqs off: otherwise Transformer Engine takes the
        # lengths for unpadded ones, drops FlashAttention 2, and some versions wait for the device.
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=call.max_seqlen,
            max_seqlen_kv=call.max_seqlen,
            # One of the two is always set: with neither, the module keeps its previous group.
            cp_group=group,
            local_cp_size=1 if group is None else group.size(),
            pad_between_seqs=False,
        )
        rows = None if call.rows is None else on_device(device, call.rows)
        return cls(params, call.num_rows, rows)

    def run(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [t, H, D], k and v [t, G, D], real tokens -> [t, H * D]."""
        out = attention(self._pad(q), self._pad(k), self._pad(v), self.params)
        out = out.reshape(self.num_rows, -1)
        return out if self.rows is None else out.index_select(0, self.rows)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return x.contiguous()
        return x.new_zeros(self.num_rows, *x.shape[1:]).index_copy(0, self.rows, x)


@dataclass(frozen=True)
class TEMicroBatch:
    """A micro-batch's calls: ring shards over the ring's group, local sequences without one.

    Two calls, since Transformer Engine cuts all sequences of a call over the same group.
    """

    ring_tokens: int
    ring: TECall | None
    local: TECall | None

    @classmethod
    def build(
        cls,
        layout: MicroBatchLayout,
        micro_batch: MicroBatch,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> TEMicroBatch:
        ring = ring_call(layout, micro_batch.ring_sequences)
        local = local_call(layout, micro_batch.local_sequences)
        return cls(
            layout.ring_tokens,
            None if ring is None else TECall.build(ring, group, device),
            None if local is None else TECall.build(local, None, device),
        )

    def run(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, G, D] in the layout's token order -> [T, H * D]."""
        n, parts = self.ring_tokens, []
        if self.ring is not None:
            parts.append(self.ring.run(attention, q[:n], k[:n], v[:n]))
        if self.local is not None:
            parts.append(self.local.run(attention, q[n:], k[n:], v[n:]))
        return torch.cat(parts)
