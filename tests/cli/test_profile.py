# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`profile` as a user calls it: Megatron's own layers, on two ranks of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_hdp.__main__ import main
from megatron_hdp.planning.cost import CostModel

MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --seq-length 512 --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --vocab-size 127"
).split()


def _profile(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_hdp", "profile", *argv],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_measures_fits_and_is_taken_by_the_planner(tmp_path, capsys):
    path = tmp_path / "profile.json"
    done = _profile(
        "--hdp-cpu", "--nproc", "2", "--output", str(path), "--repeats", "1", *MODEL,
        "--num-layers", "5", "--recompute-granularity", "selective", "--recompute-modules", "mlp",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--hdp-profile" in done.stdout
    measured = json.loads(path.read_text())["measured"]
    # the engine's counts, by recompute setting, are the planner's formula but for bytes a layer
    for setting, saved in measured["saved_bytes"].items():
        assert saved["measured"] == pytest.approx(saved["formula"], abs=0.5), setting
    assert set(measured["saved_bytes"]) == {"none", "selective core_attn", "selective mlp", "full"}
    times = measured["times"]
    assert [row["length"] for row in times] == [16, 32, 64, 128, 256, 512]
    assert times[-1]["model_s"] > 2 * times[0]["model_s"]
    assert measured["ranks"] == 2
    assert [row["ring"] for row in measured["micro_batches"]] == [1, 1, 2, 2, 2, 2, 2]
    assert measured["versions"]["megatron-core"].startswith("0.19")
    model = CostModel.load(str(path))
    assert (model.layers, measured["probe_layers"]) == (5, 2)
    assert model.activation_bytes == measured["saved_bytes"]["selective mlp"]["measured"]
    assert model.ring_bytes == 32 * (4 * 4 + 8)
    argv = ["--distribution", "prolong", "--ranks", "4", "--capacity", "8192", "--json"]
    assert main(["plan", *argv, "--profile", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["ratio"] < 1.5


@pytest.mark.parametrize(
    ("window", "share", "layers", "warned"),
    [(200, 1.0, 4, True), (200, 0.5, 4, False), (256, 1.0, 4, False), (200, 1.0, 2, False)],
)
def test_warns_where_windows_hide_attention(window, share, layers, warned):
    from megatron_hdp.runtime.profiling.result import window_warning

    measured = {
        "windows": {"window": window, "share": share},
        "times": [{"length": 256}, {"length": 512}],
        "probe_layers": 2,
    }
    warning = window_warning(measured, layers)
    assert (warning is not None) == warned
    assert not warned or ("200 tokens" in warning and "--most-layers" in warning)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--output", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--output", "x.json", "--repeats", "0"], "--repeats 0: give at least 1"),
        (["--output", "x.json", *MODEL], "torchrun --standalone --nproc-per-node"),
        (["--output", "x.json", "--hdp-cpu", *MODEL], "--num-layers is missing"),
    ],
)
def test_refuses_in_one_sentence(argv, words, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    try:
        assert main(["profile", *argv]) == 1
        said = capsys.readouterr().err
    except SystemExit as end:
        said = str(end.code)
    assert words in said


def test_other_commands_still_refuse_what_they_do_not_know(capsys):
    with pytest.raises(SystemExit):
        main(
            ["plan", "--ranks", "4", "--capacity", "512", "--distribution", "prolong", "--nonsense"]
        )
    assert "--nonsense" in capsys.readouterr().err
