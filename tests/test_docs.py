# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The docs list what is there."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")  # ours imports it, and CPU mode comes first
ROOT = Path(__file__).parents[1]


def test_every_fault_and_cpu_default_is_in_the_docs():
    from megatron_hdp.cpu.arguments import CPU_DEFAULTS
    from megatron_hdp.cpu.faults import FAULTS

    text = (ROOT / "docs" / "cpu.md").read_text()
    table = set(re.findall(r"^\| `(megatron\.[\w.:]+)` \|", text, re.MULTILINE))
    assert table == {fault.symbol for fault in FAULTS}
    words = text.replace("bias-{gelu,swiglu,dropout}", "bias-gelu bias-swiglu bias-dropout")
    for name in CPU_DEFAULTS:
        word = name.removeprefix("no_").removeprefix("apply_").removesuffix("_fusion")
        assert word.replace("_", "-") in words, name


def test_every_requirement_is_justified():
    names = set()
    for file in ROOT.glob("requirements*.txt"):
        names |= set(re.findall(r"^([\w-]+)==", file.read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names |= {re.match(r"[\w-]+", name).group() for name in asked}
    text = (ROOT / "docs" / "dependencies.md").read_text()
    justified = set(re.findall(r"^\| ([\w-]+) \|", text, re.MULTILINE))
    assert names <= justified


def test_what_is_pinned_is_in_the_range():
    from packaging.requirements import Requirement

    files = (ROOT / name for name in ("requirements.txt", "requirements-dev.txt"))
    pinned = "".join(file.read_text() for file in files)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", pinned, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    for text in [*project["dependencies"], *extras]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name]), text


def test_every_field_of_line_keys_and_trace_is_explained():
    import dataclasses

    import numpy as np

    from megatron_hdp.observability.log_line import format_line
    from megatron_hdp.observability.metrics import step_metrics
    from megatron_hdp.planning import PlannerConfig, StepRequest, plan_step
    from megatron_hdp.runtime.records import StepRecord

    page = (ROOT / "docs" / "read-the-log.md").read_text()
    plan = plan_step(PlannerConfig(4, 100), StepRequest(np.arange(4), np.array([350, 40, 30, 90])))
    record = StepRecord(
        "train", 0, 0, 0, "auto", offloaded_bytes=1, refused_bytes=1, load_retries=1
    )
    keys = step_metrics(plan, record)
    fields = [field.name for field in dataclasses.fields(StepRecord)]
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    explained = re.findall(r"`([^`]+)`", rows)
    assert [name for name in (*keys, *fields) if name not in explained] == []
    assert {name for name in explained if name.startswith("hdp/")} == set(keys)
    words = re.findall(r"[a-z][a-z-]+", format_line(plan, record).removeprefix("hdp:"))
    told = page.split("## Every step")[1].split("## Warnings")[0]
    assert [word for word in words if word not in told and word != plan.strategy] == []


def test_every_result_file_is_on_the_page_of_results():
    folder = ROOT / "scripts" / "benchmarks" / "results"
    page = (ROOT / "docs" / "results.md").read_text()
    assert set(re.findall(r"`([\w-]+\.json)`", page)) == {
        file.name for file in folder.rglob("*.json")
    }


def test_every_refusal_is_among_the_limits():
    from megatron_hdp.runtime.attention.support import SETTINGS
    from megatron_hdp.runtime.cross_entropy.support import CHUNKED_CANNOT
    from megatron_hdp.runtime.validation import RULES

    page = (ROOT / "docs" / "limits.md").read_text()
    flags = {rule.flag for rule in (*RULES, *SETTINGS)} | set(CHUNKED_CANNOT.values())
    assert len(flags) > 30
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in page] == []
