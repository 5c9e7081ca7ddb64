# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The router's losses and counts, over sequences instead of micro-batches.

Megatron takes them over a micro-batch and its static groups. Here a micro-batch is whatever the
plan made it, so: the load-balancing loss is each sequence's own, a ring's shards being one
sequence; z-loss and expert counts are sums over real tokens; all are weighted by tokens, as the
loss is. With one sequence a micro-batch that is Megatron's own (`TopKRouter`, with
--calculate-per-token-loss).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.runtime.core_attention import carried_state
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.moe.counts import ring_sum
from megatron_hdp.runtime.waiting import waiting


def bind_routers(model: torch.nn.Module) -> None:
    """Makes every router of a freshly built model follow the micro-batch of its layer's forward."""
    for layer in model.modules():
        if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer):
            _bind(layer, layer.mlp.router)


def _bind(layer: TransformerLayer, router: TopKRouter) -> None:
    losses = SequenceLosses(router)

    def follow(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Full recompute calls the layer again, with its own micro-batch: so this is always right.
        losses.state = carried_state(kwargs.get("packed_seq_params"))

    layer.register_forward_pre_hook(follow, with_kwargs=True)


class SequenceLosses:
    """Takes the place of one router's methods of the same names while an HDP micro-batch runs."""

    REPLACED = ("apply_z_loss", "_apply_aux_loss", "_apply_seq_aux_loss", "_apply_expert_bias")

    def __init__(self, router: TopKRouter) -> None:
        self.router = router
        self.state: MicroBatchState | None = None
        for name in self.REPLACED:
            setattr(router, name, self._either(getattr(router, name), getattr(self, name)))

    def _either(self, megatrons: Callable[..., Any], ours: Callable[..., Any]) -> Any:
        @functools.wraps(megatrons)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (megatrons if self.state is None else ours)(*args, **kwargs)

        return run

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> Any:
        """logits [t, E]. Sum over real tokens of squared log-sum-exp (ST-MoE, eq. 5)."""
        coefficient = self.router.config.moe_z_loss_coeff
        if coefficient is None or not (self.router.training and torch.is_grad_enabled()):
            return logits
        total = (torch.logsumexp(logits, dim=-1).square() * self._is_real()).sum()
        self._record("z_loss", total)
        return MoEAuxLossAutoScaler.apply(logits, coefficient * total)

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routed: torch.Tensor, **_: Any
    ) -> Any:
        return self._balance(probs, scores, routed, "aux_loss", "load_balancing_loss")

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routed: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        return self._balance(probs, scores, routed, "seq_aux_loss", "seq_load_balancing_loss")

    def _apply_expert_bias(self, routed: torch.Tensor, padding_mask: Any = None) -> None:
        if self.router.enable_expert_bias and torch.is_grad_enabled():
            self.router.local_tokens_per_expert += (routed & self._is_real()[:, None]).sum(0)

    def _balance(
        self, probs: torch.Tensor, scores: torch.Tensor, routed: torch.Tensor, kind: str, name: str
    ) -> Any:
        """Attaches sum over sequences of tokens x E x sum_i f_i P_i (Switch Transformer, eq. 4).

        f_i is over the whole sequence, wherever it lies; P_i over the rows here, as its gradient
        is. scores and routed are [t, E].
        """
        coefficient = self.router.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        assert self.state is not None
        counts = self._expert_counts(routed.to(scores.dtype))
        share = counts[:-1] / self.state.sequence_lengths[:, None]
        share = torch.cat((share, share.new_zeros(1, share.shape[1])))  # of padding rows
        total = (scores * share[self._sequence_of_row()]).sum()
        total = total * self.router.config.num_moe_experts / self.router.topk
        self._record(name, total)
        return MoEAuxLossAutoScaler.apply(probs, coefficient * total)

    def _expert_counts(self, routed: torch.Tensor) -> torch.Tensor:
        """[n+1, E] tokens that each whole sequence sent to each expert; padding is the last row."""
        assert self.state is not None
        counts = routed.new_zeros(self.state.num_sequences + 1, routed.shape[1])
        counts.index_add_(0, self._sequence_of_row(), routed)
        if self.router.config.sequence_parallel:
            with waiting("the tensor-parallel ranks' token counts of the experts"):
                torch.distributed.all_reduce(counts, group=self.router.tp_group)
        on_ring = self.state.layout.num_ring_sequences
        shards = counts[:on_ring].contiguous()
        counts[:on_ring] = ring_sum(shards, self.state, self.router.layer_number or 0)
        return counts

    def _sequence_of_row(self) -> torch.Tensor:
        """[t] number in the micro-batch of every row's sequence, of the rows that a router sees."""
        assert self.state is not None
        if not self.router.config.sequence_parallel:
            return self.state.sequence_of_row
        group = self.router.tp_group
        return self.state.sequence_of_row.chunk(group.size())[group.rank()]

    def _is_real(self) -> torch.Tensor:
        """[t] bool: the row is a token, not padding."""
        assert self.state is not None
        return self._sequence_of_row() < self.state.num_sequences

    def _record(self, name: str, total: torch.Tensor) -> None:
        """Logs the mean over the step's tokens; Megatron sums over the group, then divides by the
        launch line's number of micro-batches.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        assert self.state is not None
        config, group = self.router.config, self.router.tp_group
        replicas = 1 if config.sequence_parallel else group.size()
        get_moe_metrics_tracker().record(
            name,
            total * get_num_microbatches() / (self.state.step_tokens * replicas),
            self.router.layer_number,
            config.num_layers,
            reduce_group=self.router.tp_dp_cp_group,
            needs_dp_avg=False,
        )
