# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments as a CPU needs them, as defaults: what the command line says still wins."""

from __future__ import annotations

import argparse
from typing import Any

CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "attention_backend": "unfused",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "num_workers": 0,
}
"""By argparse destination. The first seven are needed, the fusions would only run unfused, and a
data loader process per rank costs more than it gives on a small machine."""


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Gives Megatron's parser the defaults of CPU mode.

    Raises:
        RuntimeError: the parser has no such argument, as after a change in Megatron.
    """
    known = {action.dest for action in parser._actions}
    missing = sorted(CPU_DEFAULTS.keys() - known)
    if missing:
        raise RuntimeError(
            f"--hdp-cpu sets {', '.join(missing)}, which this Megatron's arguments lack: install "
            f"megatron-core 0.19."
        )
    parser.set_defaults(**CPU_DEFAULTS)
