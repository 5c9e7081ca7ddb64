# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The planning process: `python -m megatron_hdp.planning.worker`, driven by `ahead.PlanAhead`.

Reads pickled requests on stdin and writes pickled answers to stdout, in order. It imports NumPy
only, and ends when stdin does, so it never outlives the rank that started it.
"""

from __future__ import annotations

import pickle
import sys

from megatron_hdp.planning.planner import plan_step, predict_step


def main() -> None:
    """First the PlannerConfig; then StepRequests, each answered ("plan" | "error", ...)."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers may go there
    config = pickle.load(source)
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        try:
            # A new plan: without what the validated one has computed and can compute again.
            plan = predict_step(config, plan_step(config, request))
            answer: tuple[str, object] = ("plan", plan)
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        try:
            pickle.dump(answer, target, protocol=5)
            target.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
