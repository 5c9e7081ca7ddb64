# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Launch lines as far as Megatron's parser and ours can be asked about them, without training."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import ROOT

NULL_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]
"""In place of Hugging Face's, which would have to be downloaded."""


class Recorder:
    """Programs in `folder` that note their arguments and do nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.noted = folder, folder / "arguments"
        for name in ("torchrun", "sbatch", "srun"):
            self._add(name, f'printf "%s\\0" {name} "$@" >"{self.noted}"')
        self._add("scontrol", "echo node1")

    def _add(self, name: str, does: str) -> None:
        program = self.folder / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)

    def run(self, words: list[str], cwd: Path | None = None, **environment: str) -> list[str]:
        """The last line that the script `words` gave to one of the programs."""
        path = os.pathsep.join((str(self.folder), os.environ["PATH"]))
        subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=30, cwd=cwd,
            env={"PATH": path, "TOKENIZER": "none", **environment},
        )  # fmt: skip
        return self.noted.read_text().split("\0")[:-1]


def read_torchrun(line: list[str]) -> argparse.Namespace:
    """torchrun's own view of its line; WORLD_SIZE and LOCAL_WORLD_SIZE become the line's."""
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(line[1:])
    ranks = int(asked.nnodes.split(":")[-1]) * int(asked.nproc_per_node)
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=asked.nproc_per_node)
    return asked


def reach_training(script: str, arguments: list[str]) -> argparse.Namespace:
    """What the launch script has made of its arguments when it would begin to train."""
    from megatron import training
    from megatron.training import arguments as megatrons

    sys.argv = [script, *arguments, "--hdp-cpu"]
    validate, validated, trained = megatrons.validate_args, [], []
    megatrons.validate_args = lambda *given: validated.append(validate(*given)) or validated[-1]
    training.pretrain = lambda *given: trained.append(given)
    runpy.run_path(script, run_name="__main__")
    assert len(validated) == len(trained) == 1
    return validated[0]


def torchrun_reaches_training(line: list[str]) -> argparse.Namespace:
    """The same of a whole torchrun line, from the project's root."""
    asked = read_torchrun(line)
    os.chdir(ROOT)
    return reach_training(asked.training_script, asked.training_script_args)
