# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""HDP's numbers reach TensorBoard and W&B through the writers that Megatron makes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_hdp.cpu.launch import run_ranks
from tests.e2e.harness import Recorded, pretrain

HDP = ["--train-iters", "4", "--hdp", "--hdp-capacity", "128", "--hdp-offload-ratio", "0.5",
       "--no-gradient-accumulation-fusion"]  # fmt: skip


def _train_with_waits(argv: list[str]) -> Recorded:
    """In this rank, the second step's tokens are slow to come, and the fourth step's plan."""
    from megatron_hdp.data.loading.local import LocalLoader

    plan, read = LocalLoader.plan, LocalLoader.read

    def late(loader, step, wanted):
        time.sleep(1.0 if step == wanted and loader._steps.name == "train" else 0.0)

    def slow_shares(loader, step, shares):
        for share in shares:
            late(loader, step, 1)
            yield share

    def slow_plan(loader, step):
        late(loader, step, 3)
        return plan(loader, step)

    LocalLoader.plan = slow_plan
    LocalLoader.read = lambda loader, step, shares: read(
        loader, step, slow_shares(loader, step, shares)
    )
    return pretrain(argv, fp64=False)


def test_tensorboard_holds_every_interval(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = ["--data-path", corpus, "--tensorboard-dir", str(tmp_path / "tb"),
            "--tensorboard-log-interval", "2", *HDP]  # fmt: skip
    recorded = run_ranks(lambda: _train_with_waits(argv), 2)[-1]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    ours = [tag for tag in events.Tags()["scalars"] if tag.startswith("hdp/")]
    assert len(ours) == 17
    assert all(tag.endswith(")") for tag in ours)
    assert all([event.step for event in events.Scalars(tag)] == [2, 4] for tag in ours)
    rings = [event.value for event in events.Scalars("hdp/rings(count)")]
    assert rings == [len(recorded.rings[1]), len(recorded.rings[3])]
    assert sum(rings) > 0
    planning, loading = (
        [event.value for event in events.Scalars(f"hdp/exposed {what}(ms)")]
        for what in ("planning", "loading")
    )
    assert loading[0] > 300 > loading[1]
    assert planning[1] > 300
    for tag in ("hdp/schedule(ms)", "hdp/predicted schedule(ms)", "hdp/sent in rings(MiB)",
                "hdp/offloaded(GiB)"):  # fmt: skip
        assert all(event.value > 0 for event in events.Scalars(tag))


def test_wandb_gets_the_same(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    argv = ["--data-path", corpus, "--wandb-project", "p", "--wandb-exp-name", "e",
            "--wandb-save-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "tb"),
            "--tensorboard-log-interval", "2", *HDP]  # fmt: skip
    recorded = run_ranks(lambda: pretrain(argv, fp64=False), 2)[-1]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps = {row["_step"]: row for row in _wandb_history(path)}
    assert sorted(steps) == [2, 4]
    for step, row in steps.items():
        assert len([name for name in row if name.startswith("hdp/")]) == 17
        assert row["hdp/rings(count)"] == len(recorded.rings[step - 1])


def _wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an offline run's file: protobufs in LevelDB's log format behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(message)
            message = b""
            if record.WhichOneof("record_type") == "history":
                yield {i.key or i.nested_key[0]: json.loads(i.value_json) for i in
                       record.history.item}  # fmt: skip


def test_a_wrong_profile_is_noticed(corpus, tmp_path):
    preset = resources.files("megatron_hdp.planning") / "presets" / "cpu-estimate.json"
    profile = json.loads(preset.read_text())
    for key in ("attention_s", "linear_s", "fixed_s"):
        profile[key] *= 100
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(profile))
    argv = ["--data-path", corpus, *HDP, "--train-iters", "24", "--hdp-profile", str(path)]

    def printed() -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            pretrain(argv, fp64=False)
        return out.getvalue()

    lines = [line for line in run_ranks(printed, 2)[-1].splitlines() if "profile this" in line]
    assert len(lines) == 1
    assert os.fspath(path) in lines[0]
