# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""`simulate` as a user calls it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_hdp.__main__ import main
from tests.observability.trace_events import check_trace


def test_the_papers_case(capsys, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    argv = "simulate --model llama-7b --gpus 1024 --context 2M --data byted --strategy all --json"
    assert (
        main([*argv.split(), "--steps", "1", "--trace", str(trace), "--picture", str(picture)]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["hdp_ranks"] == 512
    assert found["static_context_parallel"] == 256
    assert list(found["ablation"]) == ["dynamic", "offload", "balance", "loader", "auto"]
    assert found["ablation"]["auto"] == max(found["ablation"].values()) > 2.5
    assert found["strategies"]["naive"]["busy_max_over_min"] > 1.5
    assert found["strategies"]["dp-balance"]["busy_max_over_mean"] < 1.05
    for values in found["strategies"].values():
        assert sum(values["shares"].values()) == pytest.approx(1.0)
    drawn = check_trace(trace)
    assert list(drawn) == [f"{name} (simulated)" for name in found["strategies"]]
    assert {len(rows) for rows in drawn.values()} == {64}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_own_lengths_and_cluster(capsys, tmp_path):
    lengths, cluster = tmp_path / "lengths.npy", tmp_path / "cluster.json"
    np.save(lengths, np.random.RandomState(0).randint(100, 60000, 2000))
    from importlib import resources

    shipped = resources.files("megatron_hdp.simulation") / "clusters" / "h100-estimate.json"
    cluster.write_text(json.dumps({**json.loads(shipped.read_text()), "nics_per_node": 1}))
    argv = ["simulate", "--model", "llama-7b", "--gpus", "64", "--context", "64K", "--tokens",
            "4M", "--steps", "1", "--lengths", str(lengths), "--cluster",
            str(cluster), "--json"]  # fmt: skip
    picture = tmp_path / "picture.html"
    assert main([*argv, "--strategy", "auto", "--picture", str(picture)]) == 0
    assert set(json.loads(capsys.readouterr().out)["strategies"]) == {"auto"}
    page = picture.read_text()
    assert '"axis":"time in the step, simulated"' in page
    assert '"title":"auto (simulated): ' in page
    assert "/*DATA*/" not in page


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nothing"], "model nothing is neither a file nor one of"),
        (["--cluster", "nothing"], "cluster nothing is neither a file nor one of"),
        (["--gpus", "7"], "7 GPUs are no multiple of 2 tensor-parallel x 1 pipeline stages"),
        (["--tokens", "1M"], "--tokens 1048576 holds no pack of --context 2097152"),
        (["--gpus", "64"], "does not fit 32 ranks of capacity 8192"),
    ],
)
def test_refuses_in_one_sentence(argv, words, capsys):
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    full = {"--model": "llama-7b", "--gpus": "1024", "--context": "2M", "--data": "byted",
            "--strategy": "static", **given}  # fmt: skip
    assert main(["simulate", *(part for pair in full.items() for part in pair)]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_context_that_does_not_fit_is_one_sentence(capsys):
    line = "simulate --model mistral-8x7b --gpus 256 --context 256K --data byted".split()
    assert main(line) == 1
    error = capsys.readouterr().err
    assert "a context of 262144 tokens does not fit 16 ranks of capacity 8192" in error
    assert "Traceback" not in error
