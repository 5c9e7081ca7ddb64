# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What is told of a training step, and when: after Megatron's own log, at Megatron's intervals."""

from __future__ import annotations

from megatron_hdp.observability.log_line import format_line
from megatron_hdp.observability.metrics import step_metrics, write_metrics
from megatron_hdp.observability.prediction import PredictionWatch
from megatron_hdp.runtime.session import Session


class StepLog:
    """Called after Megatron's log function, on every rank."""

    def __init__(self) -> None:
        self._watch: PredictionWatch | None = None

    def __call__(self, session: Session, iteration: int, first: bool) -> None:
        """Prints the `hdp:` line, feeds the writers, compares the step with its prediction.

        Args:
            first: the first iteration after a start, which Megatron logs besides its interval.
        """
        from megatron.training import get_args
        from megatron.training.utils import print_rank_last

        plan, record = session.last_plan, session.last_record
        if plan is None or record is None:
            return
        args = get_args()
        if first or iteration % args.log_interval == 0:
            print_rank_last(format_line(plan, record))
        if iteration % args.tensorboard_log_interval == 0:
            write_metrics(step_metrics(plan, record), iteration)
        if self._watch is None:
            self._watch = PredictionWatch(session.options.profile, max(10, args.log_interval))
        warning = self._watch.observe(plan.predicted_step_s, record.duration_s)
        if warning is not None:
            print_rank_last(warning)
