# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that a layer saves, by recompute setting, as the offload engine counts them."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hdp.planning.activations import saved_bytes
from megatron_hdp.runtime.model_shape import model_shape
from megatron_hdp.runtime.offload import ActivationOffload
from megatron_hdp.runtime.profiling.probe import Probe

_NOTHING = 1e-9
"""A ratio that moves nothing."""

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "selective core_attn": {
        "recompute_granularity": "selective", "recompute_modules": ["core_attn"],
    },
    "selective mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
}  # fmt: skip


def measure_saved(probe: Probe, length: int) -> float:
    """Bytes per token that the first of the probe's layers saves on this rank."""
    forward, _ = probe.decoder_of(probe.micro_batch([length]))
    engine = ActivationOffload(1, device=probe.device)
    engine.watch(probe.model, probe.model.decoder.layers)
    with engine.activations(_NOTHING, forward.shared) as micro_batch:
        output = forward()
    del output
    return micro_batch.layers[0].saved_bytes / length


def by_setting(args: Namespace, length: int) -> dict[str, dict[str, float]]:
    """Setting -> measured bytes per token and layer, and what the planner's formula says.

    Every setting builds the model anew, since layers read it when they are made.
    """
    found = {}
    for name, changes in SETTINGS.items():
        if name == "selective mlp" and args.num_experts:
            continue  # dense layers only
        with _changed(args, changes):
            measured = measure_saved(Probe(args), length)
            found[name] = {"measured": measured, "formula": saved_bytes(model_shape(args))}
    return found


@contextmanager
def _changed(args: Namespace, changes: dict[str, Any]) -> Iterator[None]:
    before = copy.copy(vars(args))
    vars(args).update(recompute_method=None, recompute_num_layers=None, recompute_modules=None)
    vars(args).update(changes)
    try:
        yield
    finally:
        vars(args).update(before)
