# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""No wait for another process or thread without an end and a sentence.

Collectives and transfers end with their group's timeout; `waiting` makes the sentence. Other waits
take a timeout. What neither has is in ENDS, with what ends it.
"""

from __future__ import annotations

import ast
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLLECTIVES = {"barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"}
COLLECTIVES |= {"broadcast", "reduce_scatter_tensor", "broadcast_object_list"}
BLOCKING = {"wait", "join", "result", "acquire"}

ENDS = {
    ("runtime/cross_entropy/chunked.py", "weight_gradient.result"): "computes, waits for nobody",
    ("runtime/attention/transfers.py", "self._arriving_kv.wait"): "a Transfer, which has `waiting`",
    ("runtime/attention/transfers.py", "self._arriving_dkv.wait"): "a Transfer",
    ("runtime/attention/direct_transfers.py", "self._kv.pop.wait"): "a Transfer",
    ("runtime/attention/direct_transfers.py", "transfer.wait"): "a Transfer",
    ("runtime/attention/head_split.py", "transfer.wait"): "a Transfer",
    ("testing/virtual_ranks.py", "transfer.wait"): "a mailbox, which has a timeout",
    ("runtime/moe/counts.py", "state.communicators.exchange.wait"): "a Transfer",
    ("runtime/profiling/links.py", "communicators.exchange.wait"): "a Transfer",
    ("runtime/ring_groups.py", "dist.barrier"): "its group's timeout; RingGroupsError says who",
    (
        "data/loading/prefetch.py",
        "self._changed.wait",
    ): "an idle thread, until it is asked or closed",
    ("testing/virtual_ranks.py", "self._device.acquire"): "virtual ranks that wait give it back",
    ("testing/ring_timeline.py", "self._completed.result"): "under a Transfer's `waiting`",
    ("testing/ring_timeline.py", "transfer.wait"): "a Transfer",
    ("testing/ring_timeline.py", "work.wait"): "its group's timeout, told by the Transfer",
    ("cpu/launch.py", "ranks.wait"): "until training ends, as torchrun waits; ranks have timeouts",
    ("cpu/ranks.py", "os.waitpid"): "its pidfd said that it has ended",
}


def _dotted(node: ast.expr) -> str:
    """a.b(...).c -> "a.b.c"."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _is_open(call: ast.Call) -> bool:
    """Whether this call may wait for as long as another one likes."""
    name = _dotted(call.func)
    owner, _, last = name.rpartition(".")
    if owner in {"dist", "torch.distributed"} and last in COLLECTIVES:
        return not any(keyword.arg == "async_op" for keyword in call.keywords)
    if name == "os.waitpid":
        return True
    limits = [
        *call.args,
        *(keyword.value for keyword in call.keywords if "time" in (keyword.arg or "")),
    ]
    limited = any(not (isinstance(x, ast.Constant) and x.value is None) for x in limits)
    return bool(owner) and last in BLOCKING and not limited


class _OpenWaits(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_With(self, node: ast.With) -> None:
        calls = [item.context_expr for item in node.items]
        if not any(isinstance(c, ast.Call) and _dotted(c.func) == "waiting" for c in calls):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_open(node):
            self.found.append((node.lineno, _dotted(node.func)))
        self.generic_visit(node)


def _open_waits(source: str) -> list[tuple[int, str]]:
    visitor = _OpenWaits()
    visitor.visit(ast.parse(source))
    return visitor.found


def test_every_wait_has_an_end():
    seen = set()
    for folder in ("megatron_hdp", "scripts", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT)).removeprefix("megatron_hdp/")
            for line, name in _open_waits(path.read_text()):
                assert (where, name) in ENDS, f"{where}:{line}: {name} has no timeout or sentence"
                seen.add((where, name))
    assert seen == set(ENDS), "listed, and gone"


@pytest.mark.parametrize(
    "source",
    [
        "process.wait()",
        "process.wait(timeout=None)",
        "dist.barrier(group)",
        "torch.distributed.all_reduce(x)",
        "work.exchange(a).wait()",
        "os.waitpid(pid, 0)",
        "with other():\n    future.result()",
    ],
)
def test_an_open_wait_is_found(source):
    assert len(_open_waits(source)) == 1
    assert not _open_waits("with waiting('rank 1'):\n    " + source.replace("\n", "\n    "))


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(10)


def test_a_process_that_does_not_end_is_named(sleeper, monkeypatch, caplog):
    """As if the kernel held it back: the signal is not delivered."""
    from megatron_hdp.planning import child_process

    monkeypatch.setattr(child_process, "_END_S", 0.2)
    monkeypatch.setattr(sleeper, "kill", lambda: sleeper.send_signal(signal.SIGCONT))
    with caplog.at_level(logging.WARNING):
        child_process.kill_and_wait(sleeper, "planning process")
    assert f"waited 0 s for its planning process {sleeper.pid} to end" in caplog.text


def test_a_rank_that_does_not_end_is_named(monkeypatch, capsys):
    import os

    from megatron_hdp.cpu import ranks

    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        monkeypatch.setattr(ranks, "_END_S", 0.2)
        ranks._reap(ranks._Child(3, pid, os.pidfd_open(pid)))
        assert f"for rank 3 (process {pid}) to end after SIGKILL" in capsys.readouterr().err
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
