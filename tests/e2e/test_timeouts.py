# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Every wait ends, and says who waited for whom."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time

import numpy as np
import pytest

from megatron_hdp.planning import Plan, PlanError, StepRequest
from megatron_hdp.planning.builder import PlanBuilder
from tests.e2e.drills import End, ends_of
from tests.e2e.harness import plan_with, pretrain

TIMEOUT_S = 9
ARGV = [
    "--train-iters", "6", "--hdp", "--hdp-strategy", "naive", "--hdp-capacity", "128",
    "--hdp-timeout-minutes", str(TIMEOUT_S / 60),
]  # fmt: skip
PIPELINES = ["--pipeline-model-parallel-size", "2"]


def _in_slots(request: StepRequest, second_ring: int) -> Plan:
    """Two rings with the same members; a local micro-batch on rank 0 beside the second one."""
    builder = PlanBuilder(request.ids, request.lengths, 2, int(request.lengths.sum()))
    builder.add_ring((0, 1), 0, [0])
    builder.add_ring((1, 0), second_ring, [1])
    for sequence in range(2, len(request.lengths)):
        builder.add_local(0, 1, [sequence])
    return builder.build(request.step, "shifted")


class _Shifted:
    """HDP rank 0 has the second ring in slot 2, rank 1 in slot 1: each for itself a valid plan."""

    def __init__(self, request, num_ranks: int) -> None:
        self._request = request

    def get(self, step: int) -> Plan:
        from megatron_hdp.runtime.session import current_session

        rank = current_session().require_domain().rank
        plan = _in_slots(self._request(step), second_ring=2 - rank)
        plan.validate(pipeline_depth=2)
        return plan

    def close(self) -> None: ...


def _train_shifted(corpus: str, compared: bool):
    from megatron_hdp.runtime.agreement import Agreement

    plan_with(_Shifted)
    if not compared:
        Agreement.check = lambda *_: None
    return pretrain(["--data-path", corpus, *ARGV, *PIPELINES], fp64=False)


def test_validate_refuses_a_ring_whose_slots_differ():
    plan = _in_slots(StepRequest(np.arange(5), np.full(5, 100)), second_ring=2)
    plan.validate(pipeline_depth=2)
    slots = plan.slot_of.copy()
    slots[1] = 1
    with pytest.raises(PlanError, match="slot differs from its ring's"):
        dataclasses.replace(plan, slot_of=slots).validate(pipeline_depth=2)


def test_a_ring_in_different_slots_ends_in_the_comparison(corpus):
    for end in ends_of(lambda: _train_shifted(corpus, compared=True), 4):
        assert end.code == 1
        assert "plan of step 0 of train differs between ranks in layout" in end.said


@pytest.mark.slow
def test_forced_past_the_comparison_it_ends_in_the_timeout(corpus):
    """With two stages the members would wait for each other for ever."""
    ends = ends_of(lambda: _train_shifted(corpus, compared=False), 4)
    assert [end.code for end in ends] == [1, 1, 1, 1], [e.said[-1500:] for e in ends]
    found = [_ring_wait(end) for end in ends]
    timed_out = [wait for wait in found if wait and wait["waited"] >= TIMEOUT_S - 1]
    assert timed_out, ends
    assert {wait["slot"] for wait in timed_out} & {1, 2}


def _ring_wait(end: End) -> dict[str, float] | None:
    found = re.search(
        r"HDP: rank \d waited (?P<waited>[\d.]+) s for HDP rank \d \(rank \d\) to \w+, in step "
        r"(?P<step>\d+), slot (?P<slot>\d+), layer \d, \w+, ring \(\d, \d\), ring step 1",
        end.said,
    )
    return found and {name: float(value) for name, value in found.groupdict().items()}


def _mortal() -> None:
    """An alarm ends this rank: pytest's handler for it goes. Only the main thread may do this."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _stand_still() -> None:
    """Longer than anybody waits; then this rank is ended, as a scheduler would."""
    signal.alarm(TIMEOUT_S + 8)
    time.sleep(1000)


def _stuck_in_a_forward(corpus: str):
    _mortal()
    if os.environ["RANK"] == "1":
        from megatron_hdp.runtime import core_attention

        run = core_attention.ring_attention

        def stuck(q, k, v, state, **kwargs):
            if state.layout.ring:
                _stand_still()
            return run(q, k, v, state, **kwargs)

        core_attention.ring_attention = stuck
    return pretrain(["--data-path", corpus, *ARGV], fp64=False)


def _stuck_in_planning(corpus: str):
    _mortal()
    if os.environ["RANK"] == "2":
        from megatron_hdp.runtime.planner import PlanInPlace

        get = PlanInPlace.get

        def stuck(self, step):
            if step == 2:
                _stand_still()
            return get(self, step)

        PlanInPlace.get = stuck
    argv = ["--data-path", corpus, *ARGV, "--hdp-plan-ahead", "0", "--global-batch-size", "6"]
    return pretrain(argv, fp64=False)


@pytest.mark.slow
def test_a_ring_says_which_peer_did_not_come(corpus):
    ends = ends_of(lambda: _stuck_in_a_forward(corpus), 2)
    assert [end.code for end in ends] == [1, -signal.SIGALRM]
    wait = _ring_wait(ends[0])
    assert wait, ends[0].said
    assert TIMEOUT_S - 1 <= wait["waited"] <= TIMEOUT_S + 5


@pytest.mark.slow
def test_the_comparison_says_which_rank_did_not_come(corpus):
    ends = ends_of(lambda: _stuck_in_planning(corpus), 3)
    # Rank 2 finds out by itself that its own plan does not come.
    assert [end.code for end in ends[:2]] == [1, 1]
    assert "for step 2 of train to be planned" in ends[2].said
    for end in ends[:2]:
        assert re.search(
            r"HDP: rank \d waited [\d.]+ s for all ranks to compare their plan of step 2 of train: "
            r".* \(ranks 2 never came: dead, or still planning or reading\)",
            end.said,
        ), end.said[-2000:]


def _lose_the_planning_process(corpus: str):
    if os.environ["RANK"] == "1":
        from megatron_hdp.planning.ahead import PlanAhead

        get = PlanAhead.get

        def losing(self, step):
            if step == 2:
                self._process.kill()
            return get(self, step)

        PlanAhead.get = losing
    return pretrain(["--data-path", corpus, *ARGV], fp64=False)


@pytest.mark.slow
def test_a_planning_process_that_is_killed(corpus):
    ends = ends_of(lambda: _lose_the_planning_process(corpus), 2)
    assert [end.code for end in ends] == [1, 1]
    assert re.search(r"planning process ended while step \d was planned", ends[1].said)
    assert re.search(r"cannot prepare step \d of train; ranks 1: HDP.s planning", ends[0].said)
