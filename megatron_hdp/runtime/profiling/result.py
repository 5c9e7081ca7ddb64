# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""From measurements to a cost model, and how far the model is from them."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from megatron_hdp.planning.cost import MEASURED, CostModel
from megatron_hdp.planning.fit import Fit, fit
from megatron_hdp.planning.windows import Windows

_LEAST = 1e-15
"""For what was too small to measure: a cost model's coefficients are positive."""
_OF_A_JOB = ("tensor_parallel", "windows", "head_bytes")
"""Fields of a CostModel that a launch line decides, not a measurement."""
_PRODUCTS = ("megatron-core", "torch", "numpy", "transformer-engine", "flash-attn")


def profile(measured: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The content of a profile file: a CostModel's fields, and `measured` beside them.

    Args:
        measured: what `measure` returned.
        num_layers: of the whole model.
    """
    layer, whole = fit_layer(measured), fit_whole(measured)
    model = _model(measured, layer, whole, num_layers)
    values = {name: value for name, value in asdict(model).items() if name not in _OF_A_JOB}
    rows = _rows(measured)
    return {
        **values,
        MEASURED: {
            "versions": _versions(),
            **measured,
            "fit": {
                "layer_errors": [round(error, 4) for error in layer.errors],
                "layer_worst_error": round(layer.worst_error, 4),
                "model": [
                    {"tokens": row.tokens, "ring": row.ring, "error": round(error, 4)}
                    for row, error in zip(rows, whole.errors, strict=False)
                ],
                "model_worst_error": round(whole.worst_error, 4),
                "ring_overlap": overlap_of(measured),
            },
        },
    }


def fit_layer(measured: dict[str, Any]) -> Fit:
    """T(s) of one layer, forward and backward: a s^2 + b s + c; less than s^2 with windows."""
    lengths = [row["length"] for row in measured["times"]]
    squares = _windows(measured).squares(np.array(lengths)).tolist()
    seconds = [row["layer_forward_s"] + row["layer_backward_s"] for row in measured["times"]]
    return fit([squares, lengths, [1.0] * len(lengths)], seconds)


def window_warning(measured: dict[str, Any], num_layers: int) -> str | None:
    """A sentence where windows hide attention's s^2 at the lengths measured, else None.

    Far beyond its window a layer's attention is in proportion to s, as the rest of it is.
    """
    windows, longest = _windows(measured), measured["times"][-1]["length"]
    probed = measured["probe_layers"]
    if windows.share < 1 or 2 * windows.window >= longest or probed == num_layers:
        return None
    return (
        f"warning: attention's coefficient is not reliable, since all {probed} layers that were "
        f"built have a window of {windows.window} tokens, below half of the longest length of "
        f"{longest}: if the model has layers without a window, give --most-layers that reaches one."
    )


class _Row(NamedTuple):
    """One micro-batch of the probe, as the cost model sees it; per rank."""

    squares: float
    tokens: float
    carried: float
    """Tokens that a hop carries."""
    ring: int
    seconds: float


def _rows(measured: dict[str, Any]) -> list[_Row]:
    """Every micro-batch that was measured, those alone on a rank first."""
    windows = _windows(measured)
    found = []
    alone = [{"lengths": [row["length"]], "ring": 1, **row} for row in measured["times"]]
    for row in alone + measured["micro_batches"]:
        lengths, ring = np.array(row["lengths"]), row["ring"]
        parts = windows.squares(lengths, ring), lengths, windows.hop_tokens(lengths, ring)
        squares, tokens, carried = (float(part.sum()) / ring for part in parts)
        found.append(_Row(squares, tokens, carried, ring, row["model_s"]))
    return sorted(found, key=lambda row: row.ring)


def _windows(measured: dict[str, Any]) -> Windows:
    """Of the probe's layers."""
    return Windows(**measured.get("windows", {}))


def fit_whole(measured: dict[str, Any]) -> Fit:
    """The whole probe: seconds per token squared, per token, per micro-batch and per hop.

    Where transfers hide behind computing, rings do not enter: a hop's time shows nowhere then.
    """
    rows = _rows(measured)
    if overlap_of(measured):
        rows = [row for row in rows if row.ring == 1]
    squares, tokens = [row.squares for row in rows], [row.tokens for row in rows]
    hops = [float(row.ring - 1) for row in rows]
    per_byte = _transfer_s(measured)
    seconds = [row.seconds - (row.ring - 1) * row.carried * per_byte for row in rows]
    return fit([squares, tokens, [1.0] * len(rows), hops], seconds)


def _transfer_s(measured: dict[str, Any]) -> float:
    """Seconds per token of one hop through the probe, by the links' own measurement."""
    inside = _inside(measured)
    return float(measured["probe_layers"] * _ring_bytes(measured) / inside["bytes_s"])


def _model(measured: dict[str, Any], layer: Fit, whole: Fit, num_layers: int) -> CostModel:
    """The cost model of a model of so many layers.

    A TP group's work is the sum of its ranks'. What the probe takes beyond its layers (embedding,
    output layer, loss, wrapper) is there once, however many layers there are.
    """
    parallel, probed = measured["tensor_parallel"], measured["probe_layers"]
    squares_s, tokens_s, fixed_s, hop_s = whole.coefficients
    _, layer_tokens_s, layer_fixed_s = layer.coefficients
    more = num_layers - probed
    inside = _inside(measured)
    across = measured["links"].get("across", inside)
    forward = [row["model_forward_s"] / row["model_s"] for row in measured["times"]]
    return CostModel(
        name=f"profile of {platform.node()}",
        source=f"measured by `profile` on {measured['device']}, {measured['ranks']} ranks; "
        f"{measured['unit']}",
        date=datetime.date.today().isoformat(),
        layers=num_layers,
        attention_s=max(squares_s / probed, _LEAST) * parallel,
        linear_s=max((tokens_s + more * layer_tokens_s) / num_layers, _LEAST) * parallel,
        fixed_s=max(fixed_s + more * layer_fixed_s, _LEAST),
        forward_share=sum(forward) / len(forward),
        ring_bytes=_ring_bytes(measured),
        latency_s=max(hop_s / probed, _MESSAGES_PER_HOP * inside["latency_s"]),
        inside_bytes_s=inside["bytes_s"],
        across_bytes_s=across["bytes_s"],
        ranks_per_node=max(1, measured["local_ranks"] // parallel),
        activation_bytes=_saved(measured) * parallel,
        host_copy_bytes_s=min(measured["host_copies"].values()),
    )


_NO_LINK = {"latency_s": 0.0, "bytes_s": 1e15}
"""Of a single rank, which has no rings."""
_MESSAGES_PER_HOP = 3
"""K, V in forward; K, V and dK, dV in backward."""


def _inside(measured: dict[str, Any]) -> dict[str, Any]:
    links = measured["links"]
    found: dict[str, Any] = links.get("inside") or links.get("across") or _NO_LINK
    return found


def _ring_bytes(measured: dict[str, Any]) -> float:
    """K, V in both passes in the model's type, dK, dV in fp32; of all ranks of a TP group."""
    return float(measured["kv_width"] * (4 * measured["value_bytes"] + 8))


def overlap_of(measured: dict[str, Any]) -> float:
    """Share of transfers that computing hides: CPU seconds add up, a GPU's streams are assumed to
    overlap.
    """
    return 0.0 if measured["unit"].startswith("CPU") else 1.0


def _saved(measured: dict[str, Any]) -> float:
    """Of the launch line's own recompute setting, or the nearest that was measured."""
    saved = measured["saved_bytes"]
    return max(float(saved.get(measured["setting"], saved["none"])["measured"]), 1.0)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PRODUCTS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
