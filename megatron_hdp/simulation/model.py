# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A model's shape, and the cost model that it has on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.simulation.cluster import Cluster, read_json

_BACKWARD_OF_ATTENTION = 2.5
"""FLOPs of FlashAttention's backward over its forward (it recomputes the scores)."""


@dataclass(frozen=True)
class ModelShape:
    """A GPT with grouped-query attention and a gated MLP, or top-k experts of them."""

    name: str
    source: str
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn_hidden: int
    """Of one expert, where there are experts."""
    vocabulary: int
    experts: int = 1
    top_k: int = 1
    tensor_parallel: int = 1
    """What is assumed where nothing else is asked for."""
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def load(cls, name_or_path: str) -> ModelShape:
        """A preset by name, or a file by path.

        Raises:
            PlanError: there is no such preset or file, or it lacks a field.
        """
        return cls(**read_json("models", name_or_path, "model", cls))

    @property
    def attention_parameters(self) -> int:
        """Of one layer: Q, K, V and output projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_groups)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's MLP, or of one of its experts."""
        return 3 * self.hidden * self.ffn_hidden

    @property
    def layer_parameters(self) -> int:
        """Of one layer that a token passes: attention and the top-k experts, or the MLP."""
        return self.attention_parameters + self.top_k * self.expert_parameters

    @property
    def parameters(self) -> float:
        """Of the whole model, embedding and output layer apart from each other."""
        layer = self.attention_parameters + self.experts * self.expert_parameters
        return float(self.layers * layer + 2 * self.vocabulary * self.hidden)

    @property
    def exchange_bytes(self) -> float:
        """Per token and layer to the experts and back, forward and backward, in bf16."""
        return 8.0 * self.top_k * self.hidden if self.experts > 1 else 0.0

    def cost_model(
        self, cluster: Cluster, tensor_parallel: int, expert_parallel: int = 1
    ) -> CostModel:
        """Derived from FLOPs and the cluster's speeds: an estimate, not a measurement.

        Attention 2 h s^2 FLOPs forward (causal), 2.5 times that backward; everything else 6 FLOPs
        per active parameter and token, the output layer spread over the layers. Saved bytes as in
        Korthikanti et al. (arXiv 2205.05198) without the score matrices: 34 h per token, of which
        19 h are the MLP's (times top-k). Rings carry K, V in bf16, dK, dV in fp32. Experts on
        other ranks cost what `CostModel.with_experts` says.
        """
        width = self.heads * self.head_dim
        output = self.vocabulary * self.hidden / self.layers
        active = self.layer_parameters + output
        attention = 2 * width * (1 + _BACKWARD_OF_ATTENTION)
        cost = CostModel(
            name=f"{self.name} on {cluster.name}",
            source=f"derived from {self.source}; {cluster.source}",
            date=cluster.date,
            layers=self.layers,
            attention_s=attention / cluster.attention_flops_s,
            linear_s=6 * active / cluster.matmul_flops_s,
            fixed_s=self.layers * cluster.layer_fixed_s,
            forward_share=1 / (1 + _BACKWARD_OF_ATTENTION),
            ring_bytes=16.0 * self.kv_groups * self.head_dim,
            latency_s=cluster.latency_s,
            inside_bytes_s=cluster.inside_bytes_s,
            across_bytes_s=cluster.nic_bytes_s,
            ranks_per_node=cluster.ranks_per_node(tensor_parallel),
            activation_bytes=(15.0 + 19.0 * self.top_k) * self.hidden,
            host_copy_bytes_s=min(
                cluster.host_copy_bytes_s, cluster.host_bytes_s / cluster.gpus_per_node
            ),
            tensor_parallel=tensor_parallel,
        )
        if expert_parallel == 1:
            return cost
        return cost.with_experts(expert_parallel, self.exchange_bytes)
