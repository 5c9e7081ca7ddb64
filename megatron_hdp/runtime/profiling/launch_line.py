# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A user's launch line, and the one that a profile of it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeLine:
    """The same model with few layers and no pipeline; what was asked for besides."""

    argv: list[str]
    num_layers: int
    """Of the user's model."""
    probe_layers: int
    """That are built: all layers are alike."""
    capacity: int
    """Tokens per rank, as the launch line has it."""


def probe_line(argv: list[str], num_ranks: int, most_layers: int) -> ProbeLine:
    """Rewrites Megatron's arguments; later ones win over the user's own.

    Args:
        argv: Megatron's and HDP's arguments.
        num_ranks: ranks that measure.
        most_layers: layers to build at most.

    Raises:
        SystemExit: the model is not described.
    """
    given = _read(argv)
    for name in ("num_layers", "seq_length", "hidden_size"):
        if getattr(given, name) is None:
            raise SystemExit(
                f"megatron_hdp: profile measures the model of a launch line, and --"
                f"{name.replace('_', '-')} is missing: give Megatron's arguments of the model."
            )
    if given.tokenizer_type is None and given.vocab_size is None:
        raise SystemExit(
            "megatron_hdp: profile needs the vocabulary's size: give --vocab-size, or the "
            "tokenizer's arguments."
        )
    capacity = given.hdp_capacity or -(-given.seq_length // (given.context_parallel_size or 1))
    layers = min(given.num_layers, most_layers)
    if num_ranks % given.tensor_model_parallel_size:
        raise SystemExit(
            f"megatron_hdp: profile runs on {num_ranks} ranks, no multiple of "
            f"--tensor-model-parallel-size {given.tensor_model_parallel_size}: start a multiple."
        )
    domain = num_ranks // given.tensor_model_parallel_size
    forced = {
        "--num-layers": layers,
        "--pipeline-model-parallel-size": 1,
        "--context-parallel-size": 1,
        "--expert-model-parallel-size": 1,
        "--micro-batch-size": 1,
        "--global-batch-size": domain,
        "--train-iters": 1,
        "--hdp-capacity": max(capacity, -(-given.seq_length // domain)),
        "--hdp-plan-ahead": 0,
    }
    line = [*argv, *(word for name, value in forced.items() for word in (name, str(value)))]
    defaults = {
        "max_position_embeddings": ("--max-position-embeddings", str(given.seq_length)),
        "tokenizer_type": ("--tokenizer-type", "NullTokenizer"),
        "lr": ("--lr", "1e-4"),
        "position_embedding_type": ("--position-embedding-type", "rope"),
    }
    for name, words in defaults.items():
        if getattr(given, name) is None:
            line += words
    # The check asks Megatron's training loop, which does not run here; its log is not asked for.
    line += ["--no-check-for-nan-in-loss-and-grad", "--logging-level", "40"]
    if "--hdp" not in line:
        line.append("--hdp")
    return ProbeLine(line, given.num_layers, layers, capacity)


def _read(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    numbers = ("num-layers", "seq-length", "hidden-size", "vocab-size", "hdp-capacity",
               "context-parallel-size", "max-position-embeddings")  # fmt: skip
    for name in numbers:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    for name in ("tokenizer-type", "lr", "position-embedding-type"):
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(argv)[0]
