# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Predicted time of a micro-batch on a rank.

Per layer, forward and backward together: attention a*s^2, everything token-wise b*s. A ring of P
splits both by P; each of its P-1 hops takes the longer of its share of attention and its transfer.
A micro-batch costs a fixed time besides. With sliding windows, `squares` and `hop_tokens` take the
places of s^2 and of the tokens that hops carry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planning.values import PlanError
from megatron_hdp.planning.windows import NO_WINDOWS, Windows

FloatArray = NDArray[np.float64]

_MAY_BE_ZERO = ("latency_s", "exchange_s", "head_bytes")

_EXCHANGES_OVER_HOP = 2 / 3
"""An exchange before and one after attention in a pass; a hop's latency is of 3 messages."""

MEASURED = "measured"
"""In a profile file: what the coefficients were fitted to, for people; not part of the model."""


@dataclass(frozen=True)
class CostModel:
    """Coefficients, in seconds, bytes and tokens; per layer unless said otherwise."""

    name: str
    source: str
    date: str
    layers: int
    """Transformer layers of the model."""
    attention_s: float
    """a: seconds per token^2, causal, forward and backward."""
    linear_s: float
    """b: seconds per token, forward and backward; with experts, of the top-k of a token."""
    fixed_s: float
    """Seconds per micro-batch, whole model: launches, loss, loading."""
    forward_share: float
    """Forward's part of a micro-batch's time."""
    ring_bytes: float
    """Bytes per token and hop: K, V forward; K, V, dK, dV backward."""
    latency_s: float
    """Seconds per hop."""
    inside_bytes_s: float
    across_bytes_s: float
    ranks_per_node: int
    activation_bytes: float
    """Saved for backward, per token."""
    host_copy_bytes_s: float
    """Bytes per second to and from the host, all ranks of a node copying."""
    tensor_parallel: int = 1
    expert_ranks: int = 1
    """Neighbouring ranks that share experts and wait for each other in every layer."""
    exchange_s: float = 0.0
    """Seconds per token for the experts' exchange, forward and backward."""
    windows: Windows = NO_WINDOWS
    """Sliding windows of the layers; those of a launch line take the place of a file's."""
    head_bytes: float = 0.0
    """Bytes per token of q, k, v, out and their gradients in all passes, of which splitting heads
    over u members sends (u-1)/u; 0: heads are not split."""
    head_passes: float = 2.0
    """Times that a layer exchanges heads (`HeadShape.passes`)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0 and field.name not in _MAY_BE_ZERO:
                raise PlanError(f"cost model {self.name}: {field.name} is {value}: give a positive")

    @classmethod
    def load(cls, name_or_path: str) -> CostModel:
        """A preset by name, or a profile file by path.

        Raises:
            PlanError: there is no such preset or file, or it lacks a field.
        """
        path = Path(name_or_path)
        if not path.is_file():
            preset = resources.files("megatron_hdp.planning") / "presets" / f"{name_or_path}.json"
            if not preset.is_file():
                raise PlanError(
                    f"cost model {name_or_path} is neither a file nor one of the presets "
                    f"{', '.join(cls.presets())}"
                )
            text = preset.read_text()
        else:
            text = path.read_text()
        try:
            values = json.loads(text)
            values.pop(MEASURED, None)
            windows = values.pop("windows", None)
            return cls(**values, windows=Windows(**windows) if windows else NO_WINDOWS)
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"cost model {name_or_path} cannot be read: {error}") from error

    @staticmethod
    def presets() -> list[str]:
        """Names of the presets that ship."""
        folder = resources.files("megatron_hdp.planning") / "presets"
        return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())

    def with_links(self, slower_across: float) -> CostModel:
        """The same with links across nodes slower by a factor."""
        return replace(self, across_bytes_s=self.across_bytes_s / slower_across)

    def with_experts(self, ranks: int, exchange_bytes: float = 0.0) -> CostModel:
        """The same with experts shared by `ranks` neighbours.

        Args:
            exchange_bytes: per token and layer that a rank sends to the experts, forward and
                backward together, its own experts' part included; 0 keeps `exchange_s`.
        """
        inside = min(ranks, self.ranks_per_node)
        seconds = exchange_bytes / ranks * max(
            (inside - 1) / self.inside_bytes_s, (ranks - inside) / self.across_bytes_s
        )  # fmt: skip
        return replace(self, expert_ranks=ranks, exchange_s=seconds or self.exchange_s)

    def with_windows(self, windows: Windows) -> CostModel:
        """The same with sliding windows in some or all layers."""
        return replace(self, windows=windows)

    @property
    def token_s(self) -> float:
        """Seconds per token and layer, without attention."""
        return self.linear_s + self.exchange_s

    @property
    def _scale(self) -> float:
        return self.layers / self.tensor_parallel

    def local_s(self, lengths: NDArray[np.integer] | FloatArray) -> FloatArray:
        """Seconds of whole sequences on one rank, without the micro-batch's fixed part."""
        s = np.asarray(lengths, np.float64)
        per_token = self.attention_s * self.reach(s) + self.token_s
        result: FloatArray = self._scale * s * per_token
        return result

    def squares(
        self, lengths: NDArray[np.integer] | FloatArray, ranks: NDArray[np.integer] | int = 1
    ) -> FloatArray:
        """[S] the squares that a is multiplied by (`Windows.squares`)."""
        return self.windows.squares(lengths, ranks)

    def reach(self, lengths: NDArray[np.integer] | FloatArray) -> FloatArray:
        """[S] `squares` per token; s without windows."""
        s = np.asarray(lengths, np.float64)
        return self.squares(s) / s

    def hop_tokens(
        self, lengths: NDArray[np.integer] | FloatArray, ranks: NDArray[np.integer] | int
    ) -> FloatArray:
        """[S] tokens that a hop carries (`Windows.hop_tokens`)."""
        return self.windows.hop_tokens(lengths, ranks)

    def hop_s(self, ranks_in_ring: NDArray[np.integer] | int) -> FloatArray:
        """Seconds per token of a hop's transfer; a ring wider than a node crosses nodes."""
        inside = np.asarray(ranks_in_ring) <= self.ranks_per_node
        bandwidth = np.where(inside, self.inside_bytes_s, self.across_bytes_s)
        result: FloatArray = self._scale * self.ring_bytes / bandwidth
        return result

    def ring_s(
        self,
        squares: FloatArray,
        tokens: FloatArray,
        carried: FloatArray,
        size: NDArray[np.integer],
        hop_s: FloatArray | None = None,
        degree: NDArray[np.integer] | int = 1,
    ) -> FloatArray:
        """Seconds on every member of a ring, without the fixed part; element-wise.

        With some layers windowed a step's attention and its transfer are means over layers, the
        longer of which is taken: exact where both kinds of layer hide their transfers, or neither
        does. It hardly ever differs: a windowed layer has about as much attention per row that is
        sent as a full one.

        Args:
            squares: sum of `squares` of the ring's sequences; tokens: of lengths.
            carried: sum of `hop_tokens`.
            size: members, 1 for local.
            hop_s: seconds per token of a transfer, where the ring's place is known.
            degree: members that heads are split over, so that the ring is size / degree long; the
                exchange of heads is not in the result.
        """
        p = np.asarray(size, np.float64)
        per_token = self.hop_s(size) if hop_s is None else hop_s
        hops = p / np.asarray(degree, np.float64)
        step = self._scale * self.attention_s * squares / (p * hops)
        transfer = per_token * carried / p + self.layers * self.latency_s
        linear = self._scale * self.token_s * tokens / p
        result: FloatArray = linear + step + (hops - 1) * np.maximum(step, transfer)
        return result

    def head_exchange_s(
        self, tokens: FloatArray, degree: NDArray[np.integer], hop_s: FloatArray
    ) -> FloatArray:
        """Seconds of the exchanges that split heads and join them again; nothing hides them.

        Args:
            tokens: of a member's shard; degree: members that heads are split over, 1: none.
            hop_s: seconds per token of a hop between these members.
        """
        u = np.asarray(degree, np.float64)
        moved = hop_s * self.head_bytes / self.ring_bytes * (u - 1) / u * tokens
        result: FloatArray = np.where(
            u > 1,
            moved + self.head_passes * _EXCHANGES_OVER_HOP * self.layers * self.latency_s,
            0.0,
        )
        return result

    def sequence_s(self, lengths: NDArray[np.integer], size: NDArray[np.integer]) -> FloatArray:
        """Seconds of single sequences on rings of `size` ranks (1: local)."""
        s = np.asarray(lengths, np.float64)
        ring = self.ring_s(self.squares(s, size), s, self.hop_tokens(s, size), np.asarray(size))
        return np.where(np.asarray(size) > 1, ring, self.local_s(s))
