# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A cluster as the simulator sees it: nodes of GPUs, network cards, host links, speeds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_hdp.planning.cost import CostModel
from megatron_hdp.planning.values import PlanError


@dataclass(frozen=True)
class Cluster:
    """Speeds are what programs reach, not what data sheets say; bytes, seconds, FLOPs."""

    name: str
    source: str
    date: str
    gpus_per_node: int
    nics_per_node: int
    """Network cards of a node; all of its GPUs' transfers to other nodes share them."""
    nic_bytes_s: float
    """Per card and direction; one GPU uses one card."""
    inside_bytes_s: float
    """Per GPU and direction inside a node."""
    latency_s: float
    """Per message."""
    host_copy_bytes_s: float
    """Per GPU and direction to the host, alone."""
    host_bytes_s: float
    """Per node and direction to the host, all GPUs together."""
    attention_flops_s: float
    """Per GPU, in attention kernels."""
    matmul_flops_s: float
    """Per GPU, in all other layers."""
    layer_fixed_s: float
    """Per layer and micro-batch, forward and backward: launches, small kernels."""
    ring_overlap: float = 1.0
    """Share of the shorter of computing and transferring that a ring step hides."""
    gradient_overlap: float = 0.0
    """Share of the gradient synchronisation that hides behind the last backward."""
    cores_per_node: int = 0
    """CPU cores that a node's ranks share when they compute on them; 0: each has a device."""
    loader_tokens_s: float = 4e6
    """Tokens that one process's loader workers read and prepare per second."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name not in _MAY_BE_ZERO and not value > 0:
                raise PlanError(f"cluster {self.name}: {name} is {value}: give a positive")
        for name in ("ring_overlap", "gradient_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise PlanError(
                    f"cluster {self.name}: {name} is {getattr(self, name)}: give a share"
                )

    @classmethod
    def load(cls, name_or_path: str) -> Cluster:
        """A preset by name, or a file by path.

        Raises:
            PlanError: there is no such preset or file, or it lacks a field.
        """
        return cls(**read_json("clusters", name_or_path, "cluster", cls))

    @classmethod
    def of(cls, cost: CostModel) -> Cluster:
        """The cluster that a cost model implies: a network card per rank, nothing is shared."""
        return cls(
            name=cost.name,
            source=cost.source,
            date=cost.date,
            gpus_per_node=cost.ranks_per_node * cost.tensor_parallel,
            nics_per_node=cost.ranks_per_node * cost.tensor_parallel,
            nic_bytes_s=cost.across_bytes_s,
            inside_bytes_s=cost.inside_bytes_s,
            latency_s=cost.latency_s,
            host_copy_bytes_s=cost.host_copy_bytes_s,
            host_bytes_s=cost.host_copy_bytes_s * cost.ranks_per_node * cost.tensor_parallel,
            attention_flops_s=math.inf,
            matmul_flops_s=math.inf,
            layer_fixed_s=cost.fixed_s / cost.layers,
        )

    def links_into(self, cost: CostModel) -> CostModel:
        """The cost model with this cluster's links in place of its own."""
        return replace(
            cost,
            latency_s=self.latency_s,
            inside_bytes_s=self.inside_bytes_s,
            across_bytes_s=self.nic_bytes_s,
            ranks_per_node=self.ranks_per_node(cost.tensor_parallel),
            host_copy_bytes_s=min(self.host_copy_bytes_s, self.host_bytes_s / self.gpus_per_node),
        )

    def ranks_per_node(self, tensor_parallel: int) -> int:
        """HDP ranks of one pipeline stage that share a node, at least 1."""
        return max(1, self.gpus_per_node // tensor_parallel)

    def gradient_sync_s(self, num_ranks: int, parameters: float) -> float:
        """Reduce-scatter of fp32 gradients and all-gather of bf16 parameters, per GPU, exposed.

        Args:
            num_ranks: HDP ranks, each with the same `parameters` per GPU.
        """
        if num_ranks == 1 or not parameters:
            return 0.0
        crosses = num_ranks > self.gpus_per_node
        per_gpu = self.nic_bytes_s * min(1.0, self.nics_per_node / self.gpus_per_node)
        bandwidth = per_gpu if crosses else self.inside_bytes_s
        moved = 6 * parameters * (num_ranks - 1) / num_ranks
        latency = 2 * math.ceil(math.log2(num_ranks)) * self.latency_s
        return (1 - self.gradient_overlap) * (moved / bandwidth + latency)


_MAY_BE_ZERO = ("latency_s", "layer_fixed_s", "ring_overlap", "gradient_overlap", "cores_per_node")


def presets(kind: str) -> list[str]:
    """Names that ship: of `clusters` or `models`."""
    folder = resources.files("megatron_hdp.simulation") / kind
    return sorted(
        entry.name.removesuffix(".json") for entry in folder.iterdir() if ".json" in entry.name
    )


def read_json(kind: str, name_or_path: str, word: str, fields_of: type) -> dict[str, Any]:
    """A JSON object of exactly the fields of a dataclass, by preset name or path."""
    path = Path(name_or_path)
    shipped = resources.files("megatron_hdp.simulation") / kind / f"{name_or_path}.json"
    if not path.is_file() and not shipped.is_file():
        raise PlanError(
            f"{word} {name_or_path} is neither a file nor one of {', '.join(presets(kind))}"
        )
    try:
        values = json.loads((path if path.is_file() else shipped).read_text())
        fields_of(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{word} {name_or_path} cannot be read: {error}") from error
    assert isinstance(values, dict)
    return values
