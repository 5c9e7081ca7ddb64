# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""FLOPs in Megatron's log count real work, NaN is found where Megatron looks for it, and the trace
of a run is one that viewers take."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import ROOT, pretrain
from tests.observability.trace_events import check_trace

HDP = ["--train-iters", "3", "--hdp", "--hdp-capacity", "64", "--log-throughput"]
MESHES = {
    "HDP4": "",
    "HDP4, static CP kept": "--context-parallel-size 2",
    "HDP2 x PP2": "--pipeline-model-parallel-size 2 --hdp-capacity 128",
    "HDP2 x TP2": "--tensor-model-parallel-size 2 --hdp-capacity 128",
}


def _counted(argv: list[str]) -> list[tuple[float, float, float, float]]:
    """Per step: tokens and squares that Megatron counted, and those of the step's plan."""
    from megatron.training import training

    from megatron_hdp.runtime.session import current_session

    count, seen = training.num_floating_point_operations, []

    def recording(args, batch, **sums):
        squares, tokens = (
            sums["seqlen_squared_sum_in_batch"], sums["total_real_tokens_in_batch"]
        )  # fmt: skip
        lengths = current_session().last_plan.lengths.astype(np.float64)
        seen.append((tokens, squares, lengths.sum(), (lengths**2).sum()))
        # By hand: 2 s^2 h each for scores and values, halved by causality, backward costs double.
        more = count(args, batch, seqlen_squared_sum_in_batch=squares + 1e6,
                     total_real_tokens_in_batch=tokens)  # fmt: skip
        found = count(args, batch, **sums)
        assert more - found == pytest.approx(3 * 2 * args.hidden_size * args.num_layers * 1e6)
        return found

    training.num_floating_point_operations = recording
    pretrain(argv, fp64=False)
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_flops_and_trace_of_a_run(corpus, tmp_path, monkeypatch, mesh):
    argv = [
        "--data-path",
        corpus,
        *HDP,
        *MESHES[mesh].split(),
        "--hdp-trace",
        str(tmp_path / "run"),
    ]
    seen = run_ranks(lambda: _counted(argv), 4)
    assert len(seen[-1]) >= 3
    for tokens, squares, planned_tokens, planned_squares in seen[-1]:
        assert tokens == planned_tokens
        assert squares == planned_squares
        assert squares < 4 * 256**2, "four packs of many sequences are less than four long ones"
    _check_the_trace(tmp_path, mesh, [int(planned) for _, _, planned, _ in seen[-1]], monkeypatch)


def _check_the_trace(folder: Path, mesh: str, tokens: list[int], monkeypatch: Any) -> None:
    """It holds every rank and stage, and each step's tokens once."""
    out = folder / "trace.json"
    argv = ["trace.py", "--run", f"A={folder / 'run'}", "--output", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "tools" / "trace.py"), run_name="__main__")
    lines = check_trace(out)["A"]
    ranks = [f"rank {rank}" for rank in range(2 if mesh.startswith("HDP2") else 4)]
    if "PP2" in mesh:
        ranks = [f"{rank} stage {stage}" for rank in ranks for stage in (0, 1)]
    assert list(lines) == ["steps", *ranks]
    first = [e for row in ranks if "stage 1" not in row for e in lines[row]]
    planned = [
        sum(e["args"]["tokens"] for e in first
            if e["args"]["step"] == step and e["name"].startswith("forward"))
        for step in range(3)
    ]  # fmt: skip
    assert list(dict.fromkeys(planned)) == list(dict.fromkeys(tokens))  # counted twice a step
    phases = {e["name"].split()[0] for e in first}
    assert phases == ({"forward"} if "PP2" in mesh else {"forward", "backward"})


def _end_of_a_run_with_nan(argv: list[str]) -> int | None:
    """Exit code after one rank's weights turn to NaN in the second step."""
    import torch
    from megatron.training import training

    train_step, calls = training.train_step, []

    def breaking(forward_step, iterator, model, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2 and os.environ["RANK"] == "0":
            with torch.no_grad():
                next(model[0].parameters()).fill_(float("nan"))
        return train_step(forward_step, iterator, model, *args, **kwargs)

    training.train_step = breaking
    try:
        pretrain(argv, fp64=False)
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.parametrize("mesh", ["HDP4", "HDP2 x PP2"])
def test_nan_on_one_rank_ends_all_ranks(corpus, tmp_path, mesh):
    argv = ["--data-path", corpus, *HDP, *MESHES[mesh].split(), "--save", str(tmp_path)]
    argv += ["--save-interval", "100"]  # Megatron saves before it ends
    codes = run_ranks(lambda: _end_of_a_run_with_nan(argv), 4)
    assert codes == [16] * 4  # Megatron's code for a fault that a rerun reproduces
