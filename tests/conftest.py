# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""One parent imports torch and Megatron; every multi-rank test forks its ranks from it.

CPU mode is for the life of a process and refuses a machine's GPUs, so GPUs are hidden from a run of
the tests. Those marked gpu or slurm run by themselves: ./scripts/test.sh -m gpu
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import numpy as np
import pytest

APART = {"gpu": "a GPU", "slurm": "SLURM's and munge's programs"}
"""Marks of tests that run by themselves, with -m, and what they need."""


def pytest_configure(config):
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config, items):
    for mark, needed in APART.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if config.getoption("markexpr") != mark:
            reason = f"needs {needed}: run ./scripts/test.sh -m {mark} where that is"
        elif marked and not (_has_gpu() if mark == "gpu" else _has_slurm()):
            reason = f"needs {needed}, which this machine lacks"
        else:
            continue
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_slurm() -> bool:
    from tests.slurm.cluster import missing_programs

    return not missing_programs()


@pytest.fixture(scope="session")
def megatron_on_cpu():
    """Megatron imported over the CPU stand-ins, in this process, once."""
    import torch

    from megatron_hdp import cpu

    torch.set_num_threads(1)
    cpu.install()
    import megatron.training  # noqa: F401


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, megatron_on_cpu) -> str:
    """Prefix of a small corpus: lengths 1 to 256, most of them short, some the context length."""
    rng = np.random.RandomState(0)
    lengths = np.concatenate(
        (rng.randint(1, 40, 300), rng.randint(40, 257, 60), [1, 1, 2, 3, 5, 255, 256, 256])
    )
    rng.shuffle(lengths)
    return _write_corpus(tmp_path_factory.mktemp("corpus") / "tiny", lengths, rng)


@pytest.fixture(scope="session")
def dust(tmp_path_factory, megatron_on_cpu) -> str:
    """Prefix of a corpus of 1 to 3 tokens a document: hundreds of sequences in a pack of 256."""
    rng = np.random.RandomState(1)
    lengths = rng.choice([1, 2, 3], 3000, p=[0.8, 0.15, 0.05])
    return _write_corpus(tmp_path_factory.mktemp("corpus") / "dust", lengths, rng)


@pytest.fixture(scope="session")
def skewed(tmp_path_factory, megatron_on_cpu) -> str:
    """Prefix of a corpus with one sequence of the context length to every twenty short ones."""
    rng = np.random.RandomState(2)
    lengths = rng.randint(8, 40, 600)
    lengths[::20] = 256
    return _write_corpus(tmp_path_factory.mktemp("corpus") / "skewed", lengths, rng)


def _write_corpus(prefix, lengths, rng) -> str:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in lengths:
        tokens = np.append(rng.randint(0, 120, length - 1), 127 - 1)
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
