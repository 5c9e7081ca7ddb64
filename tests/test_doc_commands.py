# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Every command of README and docs: run where that is quick, else asked of the program's parser.

What each kind of command is held to stands in tests/doc_commands/rules.py.
"""

from __future__ import annotations

import gc
import os

import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.doc_commands import workspace
from tests.doc_commands.pages import Command, read
from tests.doc_commands.rules import problem, runs_tests
from tests.e2e.harness import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _by_words() -> dict[tuple[object, ...], Command]:
    """The first place of each command of all pages."""
    found: dict[tuple[object, ...], Command] = {}
    for page in PAGES:
        for command in read(str(page.relative_to(ROOT)), page.read_text()):
            key = (command.settings, command.words, command.fault)
            if key not in found or found[key].is_span:
                found[key] = command
    return found


COMMANDS = list(_by_words().values())
PLANTED = {
    "torchrun --nproc-per-node 8 scripts/pretrain_gpt.py <your arguments> --hpd": "--hpd",
    "torchrun --nproc-per-gpu 8 scripts/pretrain_gpt.py <your arguments>": "--nproc-per-gpu",
    "torchrun --nproc-per-node 8 scripts/pretrain.py": "scripts/pretrain.py: no such file",
    "CONTEX=1 scripts/examples/llama_7b.sh": "does not read it",
    "DATA=/data/corpus CHECKPOINTS=/none scripts/examples/llama_7b.sh --hdp-of": "--hdp-of",
    "sbatch --nodes 8 scripts/slurm/srun.sbatch scripts/pretrain_gpt.py <your arguments> --hpd":
        "--hpd",
    "sbatch --nods 8 scripts/slurm/srun.sbatch scripts/pretrain_gpt.py": "--nods",
    "docker run --rm megatron": "no page builds this image",
    "docker build -t x -f Dockerfile.gpu .": "Dockerfile.gpu: no such file",
    "python -m megatron_hdp.cpu.launch --nproc 2 scripts/pretrain_gpt.py <your arguments> --hpd":
        "--hpd",
    "python -m megatron_hdp docter": "docter",
    "python -m megatron_hdp plan --lengths lengths.npy --ranks 8 --capacity 9000 --comparison":
        "--comparison",
    "python -m megatron_hdp plan --lengths none.npy --ranks 8 --capacity 9000": "none.npy",
    "python -m megatron_hdp simulate --model llama --gpus 64 --context 64K --data byted": "llama",
    "python -m megatron_hdp profile --hdp-cpu --output x.json <your arguments> --num-layer 1":
        "--num-layer",
    "python scripts/benchmarks/loader.py --prat training": "--prat",
    "python scripts/benchmarks/experts.py --quick": "takes no arguments",
    "python tools/trace.py --run HDP=out --stpe 3 --output x.json": "--stpe",
    "python tools/build_corpus.py --input a --output-prefix b --maxlength 8": "--maxlength",
    "./scripts/tset.sh tests/e2e": "./scripts/tset.sh: no such file",
    "./scripts/quickstart.sh --steps 3": "takes no arguments",
    "./scripts/test.sh tests/e2e/test_gone.py": "USAGE_ERROR",
    "./scripts/test.sh tests/e2e/test_moe.py::test_gone": "USAGE_ERROR",
    "./scripts/test.sh tests/e2e/test_moe.py -k gone": "NO_TESTS_COLLECTED",
    "./scripts/test.sh tests/e2e/test_moe.py --kk": "USAGE_ERROR",
    "frobnicate --all": "no rule",
    "python -m pip install ray": "no rule",
    "python tools/trace.py <your file>": "is not understood",
    "echo 'x": "No closing quotation",
}  # fmt: skip
"""A line of a fence, and what is said about it."""
PLANTED_PAGES = {
    "<!-- not run: -->\n```bash\n./scripts/quickstart.sh\n```": "without a reason",
    "<!-- not run: so -->\nText.": "before no bash fence",
    "<!-- not run: so -->\n```bash\n./scripts/tset.sh\n```": "no such file",
    "```sh\ntrue\n```": "a fence sh",
    "```\ntrue\n```": "a fence without a name",
    "```bash\n```": "an empty fence",
    "```bash\ntrue": "not closed",
    "Text, `./scripts/test.sh tests/e2e/test_gone.py`.": "USAGE_ERROR",
    "Text, `tools/gone.py`.": "no such file",
    "Text, `python -m megatron_hdp docter`.": "docter",
}
"""The same of what is no line of a fence."""
PAGES_WITH_FAULTS = {
    **{f"```bash\n{line}\n```": said for line, said in PLANTED.items()},
    **PLANTED_PAGES,
}


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory, corpus):
    """What is wrong with a command; those of pytest are looked at in one child, all at once."""
    place = workspace.make(tmp_path_factory.mktemp("root"), corpus)

    def problems(commands: list[Command]) -> list[str | None]:
        os.chdir(place)
        gc.freeze()  # pytest collects garbage at each of its ends
        return [problem(command) for command in commands]

    planted = [command for text in PAGES_WITH_FAULTS for command in read("planted", text)]
    of_tests = [command for command in (*COMMANDS, *planted) if runs_tests(command)]
    known = dict(zip(of_tests, run_ranks(lambda: problems(of_tests), 1)[0], strict=True))

    def ask(command: Command) -> str | None:
        return known[command] if command in known else run_ranks(problems, 1, [command])[0][0]

    return ask


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.place} {' '.join(c.words[-2:])}")
def test_command(command, problem_of):
    assert problem_of(command) is None


@pytest.mark.parametrize("text", PAGES_WITH_FAULTS, ids=lambda text: text[:60].replace("\n", " "))
def test_planted_mistake(text, problem_of):
    (found,) = filter(None, map(problem_of, read("planted", text)))
    assert PAGES_WITH_FAULTS[text] in found


def test_an_excuse_stands_for_a_program_without_a_rule(problem_of):
    page = "<!-- not run: it changes the environment -->\n```bash\npython -m pip install ray\n```"
    assert [problem_of(command) for command in read("page", page)] == [None]


def test_there_are_commands_of_each_kind():
    programs = {command.words[0] for command in COMMANDS}
    assert programs > {"torchrun", "sbatch", "docker", "python", "./scripts/test.sh"}
    assert len(COMMANDS) > 80
