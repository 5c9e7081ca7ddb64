# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Rules of what starts training: torchrun, our CPU launcher, the examples, SLURM, Docker.

Each takes a line and returns the one that its program would start.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

from tests.doc_commands.errors import WrongCommandError
from tests.doc_commands.parsing import first_parse
from tests.launch_lines import NULL_TOKENIZER, Recorder, reach_training, read_torchrun

GPUS_PER_NODE = 8
READERS = {"sbatch": "scripts/slurm/common.sh", "scripts/examples/": "scripts/examples/common.sh"}
"""Where a program's environment is listed."""


def settings_of(program: list[str]) -> set[str]:
    """Environment variables that a program of ours reads."""
    text = "".join(
        Path(file).read_text()
        for start, file in READERS.items()
        if program and program[0].removeprefix("./").startswith(start)
    )
    return set(re.findall(r"\b[A-Z][A-Z_]+\b", text))


def training(words: list[str]) -> None:
    """The launch script's own arguments, up to the start of training."""
    given = words[1:]
    if "HuggingFaceTokenizer" in given:
        given = [*given, *NULL_TOKENIZER]
    os.environ.setdefault("WORLD_SIZE", "1")
    reach_training(words[0], given)


def torchrun(words: list[str]) -> list[str]:
    """A script or a module under torchrun."""
    asked = read_torchrun(words)
    os.environ["RANK"] = "0"
    given = [asked.training_script, *asked.training_script_args]
    return ["python", "-m", *given] if asked.module else ["python", *given]


def cpu_launch(words: list[str]) -> list[str]:
    """The same under megatron_hdp.cpu.launch."""
    from megatron_hdp.cpu import launch

    asked, _ = first_parse(lambda: launch.main(words[1:]))
    os.environ.update(WORLD_SIZE=str(asked.nproc), RANK="0")
    return ["python", asked.script, *asked.arguments]


def example(words: list[str]) -> list[str]:
    """An example script: what it gives torchrun, or sbatch."""
    told = {name: os.environ[name] for name in settings_of(words) & set(os.environ) - {"PATH"}}
    return _recorded([*words, *NULL_TOKENIZER], **told)


def sbatch(words: list[str]) -> list[str]:
    """Runs the batch script as SLURM would on its first node: what it gives srun."""
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    for name in ("nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "time", "mem",
                 "partition", "account", "qos", "job-name", "output"):  # fmt: skip
        parser.add_argument(f"--{name}")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words[1:])
    if not Path(asked.script).is_file():
        raise WrongCommandError(f"{asked.script}: no such file")
    gpus = int(asked.gpus_per_node or GPUS_PER_NODE)
    os.environ.update(WORLD_SIZE=str(int(asked.nodes) * gpus), LOCAL_WORLD_SIZE=str(gpus))
    return _recorded(
        ["bash", asked.script, *asked.arguments],
        SLURM_SUBMIT_DIR=os.getcwd(), SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node1",
        SLURM_NNODES=asked.nodes, SLURM_GPUS_ON_NODE=str(gpus),
    )  # fmt: skip


def srun(words: list[str]) -> list[str]:
    """What one task runs."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    for name in ("kill-on-bad-exit", "container-image", "container-workdir", "container-mounts"):
        parser.add_argument(f"--{name}")
    parser.add_argument("line", nargs=argparse.REMAINDER)
    return parser.parse_args(words[1:]).line


def bash(words: list[str]) -> list[str]:
    """A script by its name; one_rank.sh starts what follows it."""
    return words[2:] if words[1] == "scripts/slurm/one_rank.sh" else [f"./{words[1]}", *words[2:]]


def docker(words: list[str]) -> list[str]:
    """`build` of a file that is there; `run` of an image that a page builds."""
    parser = argparse.ArgumentParser("docker", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    build, run = commands.add_parser("build"), commands.add_parser("run")
    build.add_argument("-t", required=True)
    build.add_argument("-f", default="Dockerfile")
    build.add_argument("--build-arg", action="append")
    build.add_argument("context")
    run.add_argument("--rm", action="store_true")
    for name in ("--gpus", "--ipc", "--ulimit", "--shm-size", "--volume", "-v", "--env", "-e"):
        run.add_argument(name, action="append")
    run.add_argument("image")
    run.add_argument("line", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words[1:])
    if asked.command == "build":
        if not Path(asked.context, asked.f).is_file():
            raise WrongCommandError(f"-f {asked.f}: no such file in {asked.context}")
        return []
    pages = "".join(page.read_text() for page in Path("docs").glob("*.md"))
    if asked.image not in re.findall(r"docker build .*-t (\S+)", pages):
        raise WrongCommandError(f"{asked.image}: no page builds this image")
    return asked.line


def _recorded(words: list[str], **environment: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return Recorder(Path(folder)).run(words, **environment)
