# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Every example's arguments, as its shell gives them, pass the launch script up to training."""

from __future__ import annotations

import argparse
import subprocess

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import ROOT
from tests.launch_lines import NULL_TOKENIZER, Recorder, torchrun_reaches_training

EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*_*.sh"))
CONTEXTS = {"256K": 2**18, "512K": 2**19, "1M": 2**20, "2M": 2**21}
BILLIONS = {"llama_7b": 7, "llama_13b": 13, "llama_30b": 30, "llama_70b": 70, "mixtral_8x7b": 47,
            "mixtral_8x22b": 141}  # fmt: skip


@pytest.fixture
def launcher(tmp_path):
    """Runs an example with a torchrun and an sbatch that only note their arguments."""
    recorder = Recorder(tmp_path)
    return lambda example, *given, **told: recorder.run([str(example), *given], **told)


def _parameters(args: argparse.Namespace) -> float:
    """Of all layers, without the embeddings."""
    attention = args.hidden_size**2 * (2 + 2 * args.num_query_groups / args.num_attention_heads)
    mlp = 3 * args.hidden_size * args.ffn_hidden_size * (args.num_experts or 1)
    return args.num_layers * (attention + mlp)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_arguments_reach_training(corpus, launcher, example, context):
    line = launcher(
        example, *NULL_TOKENIZER, DATA=corpus, CHECKPOINTS="/none", CONTEXT=str(CONTEXTS[context])
    )
    (args,) = run_ranks(lambda: torchrun_reaches_training(line), 1)
    mesh = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size == mesh * args.context_parallel_size, "the smallest world"
    assert f"# 256K: {mesh * 32} GPUs" in example.read_text()
    assert (args.seq_length, args.context_parallel_size * 8192) == (CONTEXTS[context],) * 2
    assert args.global_batch_size * args.seq_length == 2**25, "tokens a step"
    assert _parameters(args) == pytest.approx(BILLIONS[example.stem] * 1e9, rel=0.2)
    assert args.hdp


def test_environment_overrides(corpus, launcher):
    line = launcher(
        EXAMPLES[-3], *NULL_TOKENIZER, DATA=f"1 {corpus} 2 {corpus}", CHECKPOINTS="/none",
        NODES="4", GPUS_PER_NODE="64", CAPACITY="131072", STEPS="7", NODE_RANK="2",
    )  # fmt: skip
    assert line[1:7] == ["--nnodes", "4", "--nproc-per-node", "64", "--node-rank", "2"]
    (args,) = run_ranks(lambda: torchrun_reaches_training(line), 1)
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
