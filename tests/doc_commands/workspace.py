# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A folder that looks like the project's root, with the files that the pages' examples name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tests.doc_commands.pages import YOURS
from tests.e2e.harness import ROOT

PRESETS = ROOT / "megatron_hdp"
COPIES = {
    "h100.json": "planning/presets/h100-estimate.json",
    "my.json": "simulation/models/llama-7b.json",
    "my-cluster.json": "simulation/clusters/bytescale-inferred.json",
}
"""What `profile`, or a user by hand, would have written."""
CORPORA = ("data/corpus", "out/quickstart/code", "out/mine")
PLACEHOLDERS = {"/data/corpus": "data/corpus"}
"""Words of the pages that stand for a user's own, and what they are here."""
YOUR_ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8192 "
    "--max-position-embeddings 8192 --position-embedding-type rope --micro-batch-size 1 "
    "--global-batch-size 64 --lr 1e-4 --train-iters 2 --attention-dropout 0 --hidden-dropout 0 "
    "--data-path data/corpus --tokenizer-type NullTokenizer --vocab-size 127"
).split()
f"""{YOURS}: the least that Megatron wants to hear."""


def make(folder: Path, corpus: str) -> Path:
    """Links to the project's files, and what the examples read. `corpus` is a prefix."""
    for path in ROOT.iterdir():
        if path.name not in ("out", ".git", ".venv"):
            (folder / path.name).symlink_to(path)
    np.save(folder / "lengths.npy", np.random.RandomState(0).randint(1, 60000, 2000))
    for name, source in COPIES.items():
        shutil.copy(PRESETS / source, folder / name)
    for prefix in CORPORA:
        (folder / prefix).parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".bin", ".idx"):
            shutil.copy(corpus + suffix, folder / (prefix + suffix))
    return folder
