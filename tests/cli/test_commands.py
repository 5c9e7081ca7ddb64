# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The commands as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_hdp", *argv],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.RandomState(0).randint(1, 5000, 3000))
    return str(path)


STEP_KEYS = {
    "predicted_s", "lower_bound_s", "ratio", "planner_cpu_ms", "travelled_token_share",
    "ring_bytes", "static_ring_bytes", "ring_sizes", "micro_batches_min", "micro_batches_max",
    "memory_peak_tokens", "offloaded_bytes",
}  # fmt: skip


def test_plan_json(lengths):
    done = _run("plan", "--lengths", lengths, "--ranks", "12", "--capacity", "1024", "--steps",
                "2", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["strategy"], found["ranks"], found["capacity"]) == ("auto", 12, 1024)
    assert len(found["steps"]) == 2
    for step in found["steps"]:
        assert set(step) == STEP_KEYS
        assert 1.0 <= step["ratio"] < 1.1
        assert step["memory_peak_tokens"] <= 1024


def test_plan_reports_the_loss_of_each_mode(lengths):
    done = _run("plan", "--lengths", lengths, "--ranks", "12", "--capacity", "1024", "--json",
                "--vocabulary", "131072", "--tensor", "8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tokens = found["steps"][0]["memory_peak_tokens"]
    assert found["loss_bytes"]["megatron"] == 6 * tokens * 131072 / 8
    assert found["loss_bytes"]["fused"] == 2 * tokens * 131072 / 8
    assert found["loss_bytes"]["chunked"] == 6 * tokens * 131072 / 8
    assert "largest_capacity" not in found


def test_plan_says_what_capacity_each_loss_leaves(lengths):
    """At 5.5 GiB Megatron's loss leaves less than chunked; the refusal names both."""
    argv = ["plan", "--lengths", lengths, "--ranks", "12", "--tensor", "8", "--json",
            "--vocabulary", "131072", "--device-memory", "5.5"]  # fmt: skip
    found = json.loads(_run(*argv, "--capacity", "8192").stdout)
    most = found["largest_capacity"]
    assert most["megatron"] < 8192 < most["chunked"]
    assert found["cross_entropy"] == "chunked"
    per_token = 139264 * 32 / 8
    room = 0.9 * 5.5 * 2**30
    assert most["megatron"] == int(room / (per_token + 6 * 131072 / 8))
    assert most["chunked"] == int((room - 6 * 1024 * 131072 / 8) / per_token)
    done = _run(*argv, "--capacity", "12000", "--cross-entropy", "megatron")
    assert done.returncode == 1
    assert "--capacity 12000 with --cross-entropy megatron" in done.stderr
    assert f"at most --capacity {most['megatron']}" in done.stderr
    assert f"chunked with at most {most['chunked']}" in done.stderr


def test_plan_says_what_sharing_experts_costs(lengths):
    line = ["plan", "--lengths", lengths, "--ranks", "16", "--capacity", "1024"]
    done = _run(*line, "--expert-parallel", "8", "--json")
    (step,) = json.loads(done.stdout)["steps"]
    alone = json.loads(_run(*line, "--json").stdout)["steps"][0]
    assert step["over_dense"] == pytest.approx(step["predicted_s"] / alone["predicted_s"])
    assert 1 <= step["over_dense"] < 1.5
    assert "over_dense" not in alone
    table = _run(*line, "--expert-parallel", "8").stdout
    assert "/ dense" in table
    refused = _run(*line, "--expert-parallel", "5")
    assert refused.returncode == 1
    assert (
        "5 ranks that share experts (--expert-parallel) do not divide"
        in refused.stdout + refused.stderr
    )


def test_plan_compare_shows_all_strategies(lengths):
    done = _run("plan", "--lengths", lengths, "--ranks", "16", "--capacity", "1024", "--compare",
                "--json", "--pipeline", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {entry["strategy"]: entry["steps"][0] for entry in json.loads(done.stdout)}
    assert set(found) == {"static", "naive", "dp-balance", "pp-balance", "auto"}
    assert all(found["auto"]["ratio"] <= other["ratio"] for other in found.values())
    assert found["static"]["travelled_token_share"] == 1.0
    assert found["auto"]["ring_bytes"] < found["static"]["ring_bytes"]


@pytest.mark.parametrize("name", ["picture.png", "picture.html"])
def test_plan_picture(lengths, tmp_path, name):
    path = tmp_path / name
    done = _run("plan", "--lengths", lengths, "--ranks", "8", "--capacity", "1024", "--picture",
                str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = path.read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert b"time in the step, predicted" in content
        assert b"http" not in content, "not self-contained"


def test_plan_reads_text_and_a_corpus(tmp_path, corpus):
    text = tmp_path / "lengths.txt"
    text.write_text("\n".join(["100", "2000", "37"] * 50))
    for source in (str(text), corpus):
        done = _run("plan", "--lengths", source, "--ranks", "4", "--capacity", "512", "--json")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lengths", "/nowhere/x.npy"], ["/nowhere/x.npy"]),
        (["--distribution", "prolong", "--capacity", "0"], ["--capacity 0", "at least 1"]),
        (["--distribution", "prolong", "--profile", "nothing"], ["cost model nothing", "presets"]),
        (["--distribution", "prolong", "--picture", "x.gif"], ["x.gif", ".png or .html"]),
        (["--distribution", "prolong", "--device-memory", "80"], ["--device-memory", "--vocab"]),
        (["--distribution", "prolong", "--window", "-1"], ["--window -1", "at least 0"]),
        (["--distribution", "prolong", "--window-layers", "0.5"], ["0.5 has no window"]),
    ],
)
def test_plan_refuses_in_one_sentence(argv, words):
    done = _run("plan", "--ranks", "4", *([] if "--capacity" in argv else ["--capacity", "512"]),
                *argv)  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_too_long_for_the_domain_says_what_would_fit(lengths):
    done = _run("plan", "--lengths", lengths, "--ranks", "4", "--capacity", "100")
    assert done.returncode == 1
    assert "does not fit 4 ranks of capacity 100" in done.stderr
    assert "give a capacity of at least 1" in done.stderr


def test_doctor_json():
    done = _run("doctor", "--json", "--local-ranks", "8", "--hdp-host-memory", "1000000")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(report["patches"]) == 8
    for entry in (*report["patches"], *report["seams"]):
        assert entry["fits"] is True, entry
        assert {"target", "file", "expected", "found", "fits", "applied"} <= set(entry)
    assert {backend["name"] for backend in report["backends"]} >= {"cpu_flash", "reference"}
    names = {check["name"] for check in report["machine"]}
    assert {"GPUs", "network adapters", "ulimit memlock", "ulimit nofile", "ulimit nproc",
            "/dev/shm", "host memory for offload"} <= names  # fmt: skip
    (step,) = [step for step in report["next_steps"] if "offload" in step]
    assert "--hdp-host-memory" in step


def test_doctor_names_what_does_not_fit(tmp_path):
    """A Megatron whose function has another signature: exit code 1, and the way out."""
    code = """
import sys
from megatron_hdp import cpu
cpu.install()
from megatron.training import arguments
def parse_args(something_new): ...
arguments.parse_args = parse_args
from megatron_hdp.__main__ import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "1. megatron.training.arguments:parse_args has changed: found (something_new)" in (
        done.stdout
    )
    assert "HDP does not fit" in done.stdout
