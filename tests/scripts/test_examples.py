# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Every example's arguments, as its shell gives them, pass the launch script up to training."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import ROOT

EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*_*.sh"))
CONTEXTS = {"256K": 2**18, "512K": 2**19, "1M": 2**20, "2M": 2**21}
BILLIONS = {"llama_7b": 7, "llama_13b": 13, "llama_30b": 30, "llama_70b": 70, "mixtral_8x7b": 47,
            "mixtral_8x22b": 141}  # fmt: skip
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]
"""In place of Hugging Face's, which would have to be downloaded."""


@pytest.fixture
def launcher(tmp_path):
    """Runs an example with a torchrun and an sbatch that only note their arguments."""
    for name in ("torchrun", "sbatch"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >"{tmp_path}/arguments"\n')
        program.chmod(0o755)

    def run(example: Path, *arguments: str, **environment: str) -> list[str]:
        path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
        subprocess.run(
            [str(example), *arguments], check=True, capture_output=True, text=True, timeout=30,
            env={"PATH": path, "TOKENIZER": "none", **environment},
        )  # fmt: skip
        return (tmp_path / "arguments").read_text().split("\0")[:-1]

    return run


def _reach_training(line: list[str]) -> argparse.Namespace:
    """What scripts/pretrain_gpt.py has made of torchrun's line when it would begin to train."""
    from megatron import training
    from megatron.training import arguments
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(line[1:])
    ranks = int(asked.nnodes) * int(asked.nproc_per_node)
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=asked.nproc_per_node)
    os.chdir(ROOT)
    sys.argv = [asked.training_script, *asked.training_script_args, "--hdp-cpu"]
    validate, validated, trained = arguments.validate_args, [], []
    arguments.validate_args = lambda *given: validated.append(validate(*given)) or validated[-1]
    training.pretrain = lambda *given: trained.append(given)
    runpy.run_path(asked.training_script, run_name="__main__")
    assert len(validated) == len(trained) == 1
    return validated[0]


def _parameters(args: argparse.Namespace) -> float:
    """Of all layers, without the embeddings."""
    attention = args.hidden_size**2 * (2 + 2 * args.num_query_groups / args.num_attention_heads)
    mlp = 3 * args.hidden_size * args.ffn_hidden_size * (args.num_experts or 1)
    return args.num_layers * (attention + mlp)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_arguments_reach_training(corpus, launcher, example, context):
    line = launcher(
        example, *TOKENIZER, DATA=corpus, CHECKPOINTS="/none", CONTEXT=str(CONTEXTS[context])
    )
    (args,) = run_ranks(lambda: _reach_training(line), 1)
    mesh = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size == mesh * args.context_parallel_size, "the smallest world"
    assert f"# 256K: {mesh * 32} GPUs" in example.read_text()
    assert (args.seq_length, args.context_parallel_size * 8192) == (CONTEXTS[context],) * 2
    assert args.global_batch_size * args.seq_length == 2**25, "tokens a step"
    assert _parameters(args) == pytest.approx(BILLIONS[example.stem] * 1e9, rel=0.2)
    assert args.hdp


def test_environment_overrides(corpus, launcher):
    line = launcher(
        EXAMPLES[-3], *TOKENIZER, DATA=f"1 {corpus} 2 {corpus}", CHECKPOINTS="/none",
        NODES="4", GPUS_PER_NODE="64", CAPACITY="131072", STEPS="7", NODE_RANK="2",
    )  # fmt: skip
    assert line[1:7] == ["--nnodes", "4", "--nproc-per-node", "64", "--node-rank", "2"]
    (args,) = run_ranks(lambda: _reach_training(line), 1)
    assert (args.world_size, args.context_parallel_size, args.train_iters) == (256, 2, 7)
    assert args.data_path == ["1", corpus, "2", corpus]


def test_slurm_gets_the_same_line(launcher):
    given = {"DATA": "data", "CHECKPOINTS": "checkpoints"}
    plain = launcher(EXAMPLES[0], **given)
    file = "scripts/slurm/srun.sbatch"
    submitted = launcher(EXAMPLES[0], SBATCH=file, **given)
    assert submitted[:6] == ["sbatch", "--nodes", "16", "--gpus-per-node", "8", file]
    script = "scripts/pretrain_gpt.py"
    assert submitted[submitted.index(script) :] == plain[plain.index(script) :]


def test_what_must_be_given_is_asked_for():
    for example in EXAMPLES:
        done = subprocess.run([str(example)], capture_output=True, text=True, env={}, check=False)
        assert done.returncode
        assert "DATA: is the prefix of your corpus" in done.stderr
