# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Everything that a profile measures, in one process per rank; no result is assumed."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.model_shape import windows
from megatron_hdp.runtime.profiling.clock import Clock
from megatron_hdp.runtime.profiling.launch_line import ProbeLine
from megatron_hdp.runtime.profiling.links import host_copies, links
from megatron_hdp.runtime.profiling.probe import Probe
from megatron_hdp.runtime.profiling.saved import by_setting
from megatron_hdp.runtime.profiling.times import (
    lengths_to_measure,
    measure_length,
    measure_micro_batch,
    measure_step,
    micro_batches_to_measure,
    parameters_here,
)

Advance = Callable[[str, float], None]
"""Told what comes next, and which share of all is done."""


def measure(line: ProbeLine, repeats: int, longest: int | None, advance: Advance) -> dict[str, Any]:
    """Runs on every rank, `megatron_hdp.enable()` called; the same values come out everywhere.

    Seconds are those of `Clock.unit`. Nothing is written and nothing is trained.
    """
    advance("building the model", 0.0)
    with _quiet():
        probe = _build(line)
    clock = Clock(probe.device)
    lengths = lengths_to_measure(line.capacity, longest)
    work = [length**1.5 for length in lengths]
    times: list[dict[str, float]] = []
    for index, length in enumerate(lengths):
        advance(f"layers at {length} tokens", 0.05 + 0.55 * sum(work[:index]) / sum(work))
        times.append(measure_length(probe, clock, length, repeats)._asdict())
    advance("packs and rings", 0.6)
    micro_batches = [
        measure_micro_batch(probe, clock, sequences, ring, repeats)._asdict()
        for sequences, ring in micro_batches_to_measure(lengths, probe.domain.size)
    ]
    advance("links", 0.75)
    found_links = links(clock, probe.domain, repeats)
    advance("host copies", 0.8)
    copies = host_copies(clock, repeats)
    advance("gradients and optimizer", 0.85)
    step = measure_step(probe, clock, repeats)
    advance("saved activations", 0.9)
    with _quiet():
        saved = by_setting(probe.args, max(8, min(lengths)))
    advance("done", 1.0)
    return {
        "unit": clock.unit,
        "device": _device_name(probe.device),
        "ranks": dist.get_world_size(),
        "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        "probe_layers": probe.num_layers,
        "windows": asdict(windows(probe.args)),
        "times": times,
        "reference_s": clock.reference_s,
        "micro_batches": micro_batches,
        "links": {name: link.as_dict() for name, link in found_links.items()},
        "host_copies": copies,
        "step": {**step, "parameters": parameters_here(probe)},
        "saved_bytes": saved,
        "tensor_parallel": probe.args.tensor_model_parallel_size,
        "kv_width": probe.args.kv_channels * (probe.args.num_query_groups
            if probe.args.group_query_attention else probe.args.num_attention_heads),
        "value_bytes": probe.args.params_dtype.itemsize,
        "setting": _setting(probe.args),
    }  # fmt: skip


def _build(line: ProbeLine) -> Probe:
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["profile", *line.argv]
    args = parse_and_validate_args()
    initialize_megatron()
    torch.manual_seed(args.seed)
    return Probe(args)


def _setting(args: Any) -> str:
    """The name of the recompute setting that the launch line has."""
    if args.recompute_granularity != "selective":
        return args.recompute_granularity or "none"
    return " ".join(["selective", *(args.recompute_modules or ["core_attn"])])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron prints its arguments and sizes, which are not what one asks a profile for."""
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    logging.disable(logging.NOTSET)
