# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Commands in the bash fences of README and docs: `plan` runs, of others the files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.__main__ import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:\./)?(?:scripts|tests|tools|\.ci)/\S*")
OURS = ["python", "-m", "megatron_hdp"]


def commands(text: str) -> list[list[str]]:
    """Words of each command of a page; `<your arguments>` is left out."""
    lines = "".join(FENCE.findall(text)).replace("\\\n", " ").replace("<your arguments>", "")
    words = (shlex.split(line, comments=True) for line in lines.splitlines())
    return [line for line in words if line]


ALL = [(page.name, line) for page in PAGES for line in commands(page.read_text())]
PLANS = [line[3:] for _, line in ALL if line[:4] == [*OURS, "plan"]]


def missing(line: list[str]) -> list[str]:
    """Files of the project that a command names and that are not there."""
    named = (word.split("::")[0] for word in line if FILE.fullmatch(word))
    return [word for word in named if not (ROOT / word).exists()]


def test_files_of_all_commands_exist():
    assert len(ALL) > 15
    assert [(page, line) for page, line in ALL if missing(line)] == []
    assert missing(commands("```bash\n./scripts/tset.sh tests/e2e\n```")[0]) == [
        "./scripts/tset.sh"
    ]


@pytest.mark.parametrize("line", PLANS, ids=" ".join)
def test_plans_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.random.RandomState(0).randint(1, 60000, 2000))
    preset = ROOT / "megatron_hdp" / "planning" / "presets"
    Path("h100.json").write_text(next(preset.glob("*.json")).read_text())
    assert main(line) == 0
    if "--picture" in line:
        assert Path(line[line.index("--picture") + 1]).stat().st_size > 1000
    with pytest.raises(SystemExit):
        main([*line, "--no-such-flag"])


def test_a_context_that_does_not_fit_is_one_sentence(capsys):
    line = "simulate --model mistral-8x7b --gpus 256 --context 256K --data byted".split()
    assert main(line) == 1
    error = capsys.readouterr().err
    assert "a context of 262144 tokens does not fit 16 ranks of capacity 8192" in error
    assert "Traceback" not in error
