# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Runs a plan through Megatron's own schedule: this rank's count, this rank's micro-batches.

The schedule is Megatron's, untouched; its arguments are ours: how many micro-batches, which one a
forward step works on, and, with pipeline stages, the shapes that travel between them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_hdp.planning.values import MicroBatch
from megatron_hdp.runtime.attention.transformer_engine import TEMicroBatch
from megatron_hdp.runtime.context import CurrentMicroBatch, running
from megatron_hdp.runtime.micro_batch import MicroBatchState
from megatron_hdp.runtime.pipeline import PlannedShapes, StageOrder
from megatron_hdp.runtime.records import StepRecord
from megatron_hdp.runtime.session import Session
from megatron_hdp.runtime.step import HdpDataIterator, PreparedStep

_logger = logging.getLogger(__name__)

Schedule = Callable[..., Any]
ForwardStep = Callable[..., Any]


def hdp_schedule(schedule: Schedule, session: Callable[[], Session]) -> Schedule:
    """Wraps a schedule that Megatron's `get_forward_backward_func` returned.

    With any other data iterator than HDP's the schedule runs as it is.
    """

    @functools.wraps(schedule)
    def run(
        *, forward_step_func: ForwardStep, data_iterator: Any, model: Any, **kwargs: Any
    ) -> Any:
        iterator = _hdp_iterator(data_iterator)
        if iterator is None:
            return schedule(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                **kwargs,
            )
        # A rerun of the step (Megatron's result validation) must see the same micro-batches.
        replaying = (
            any(getattr(one, "replaying", False) for one in _as_list(data_iterator))
            and iterator.current is not None
        )
        step = iterator.current if replaying else iterator.begin_step()
        assert step is not None
        return _StepRun(session(), iterator, step, model, replaying).run(
            schedule, forward_step_func, data_iterator, kwargs
        )

    return run


def _as_list(one_or_more: Any) -> list[Any]:
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _hdp_iterator(data_iterator: Any) -> HdpDataIterator | None:
    """Ours, out of Megatron's RerunDataIterator, or of a list of them that all hold it."""
    inner = [getattr(one, "iterable", one) for one in _as_list(data_iterator)]
    first = inner[0] if inner else None
    same = all(one is first for one in inner)
    return first if same and isinstance(first, HdpDataIterator) else None


class _StepRun:
    """One call of the schedule."""

    def __init__(
        self,
        session: Session,
        iterator: HdpDataIterator,
        step: PreparedStep,
        model: Any,
        replaying: bool,
    ) -> None:
        self.session = session
        self.iterator = iterator
        self.step = step
        self.replaying = replaying
        self.chunks = _as_list(model)
        self.config = get_model_config(self.chunks[0])
        self.domain = session.require_domain()
        self.record = StepRecord(
            kind=iterator.config.name,
            step=step.step,
            rank=self.domain.rank,
            pipeline_stage=parallel_state.get_pipeline_model_parallel_rank(),
            strategy=step.plan.strategy,
            exposed_planning_s=0.0 if replaying else iterator.waited.planning_s,
            exposed_loading_s=0.0 if replaying else iterator.waited.loading_s,
            loaded_s=step.loaded.seconds,
            loaded_tokens=step.loaded.tokens,
            loaded_bytes=step.loaded.bytes,
            load_retries=step.loaded.retries,
            slots=[_slot_record(layout) for layout in step.layouts],
            sequences=f"{step.digest.sequences:016x}",
        )
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.distributed.get_backend() == "nccl"
            else torch.device("cpu")
        )
        te_calls = self._transformer_engine_calls(device)
        self.micro_batches = [
            CurrentMicroBatch(
                MicroBatchState.build(
                    layout,
                    step=step.step,
                    slot=slot,
                    step_tokens=step.plan.num_tokens,
                    communicators=self.domain.communicators,
                    device=device,
                    offload_ratio=micro_batch.offload_ratio,
                    transformer_engine=te_calls[slot],
                ),
                batch,
            )
            for slot, (layout, batch, micro_batch) in enumerate(
                zip(step.layouts, step.loaded.batches, step.micro_batches, strict=True)
            )
        ]

        self.order = self._stage_order()
        self.record.forward_slots = list(self.order.forwards)

    def _transformer_engine_calls(self, device: torch.device) -> Sequence[TEMicroBatch | None]:
        """What its attention takes of every micro-batch; None where HDP's ring runs.

        Collective over the world when a ring has no process group yet.
        """
        step = self.step
        if not self.session.options.uses_transformer_engine:
            return [None] * len(step.layouts)
        groups = self.session.require_ring_groups()
        groups.prepare(step.plan, f"step {step.step} of {self.iterator.config.name}")
        return [
            TEMicroBatch.build(
                layout,
                micro_batch,
                groups.group(layout.ring) if layout.ring is not None else None,
                device,
            )
            for layout, micro_batch in zip(step.layouts, step.micro_batches, strict=True)
        ]

    def run(
        self, schedule: Schedule, forward_step: ForwardStep, data_iterator: Any, kwargs: Any
    ) -> Any:
        kwargs["num_microbatches"] = len(self.micro_batches)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            self._plan_pipeline_shapes(kwargs)
        forward_only = bool(kwargs.get("forward_only", False))
        sent = self.domain.communicators.bytes_sent
        offloaded, refused = self._offload_totals()
        cpu = time.process_time()
        self.record.begin_s = time.time()
        try:
            result = schedule(
                forward_step_func=self._forward_step(forward_step),
                data_iterator=data_iterator,
                model=self.chunks,
                **kwargs,
            )
        except Exception as error:
            error.add_note(self._where())
            raise
        self.record.end_s = time.time()
        self.record.busy_s = time.process_time() - cpu
        self.record.ring_bytes = self.domain.communicators.bytes_sent - sent
        now = self._offload_totals()
        self.record.offloaded_bytes, self.record.refused_bytes = (
            now[0] - offloaded,
            now[1] - refused,
        )
        if self.record.refused_bytes and not refused:
            _logger.warning(
                "hdp: rank %d: --hdp-host-memory %g GiB is full, so %.2f GiB of activations stay "
                "on the device in step %d",
                self.domain.rank, self.session.options.host_memory,
                self.record.refused_bytes / 2**30, self.step.step,
            )  # fmt: skip
        if not forward_only:
            self.session.last_plan, self.session.last_record = self.step.plan, self.record
            if not self.replaying:
                _count_real_tokens(self.step.micro_batches, self.domain.rank)
        if self.session.options.trace is not None:
            self.record.loss_sum, self.record.loss_tokens = _loss_totals(result)
            self.record.write(self.session.options.trace, torch.distributed.get_rank())
        return result

    def _offload_totals(self) -> tuple[int, int]:
        """(bytes offloaded, bytes that found no host memory) so far on this rank."""
        offload = self.session.offload
        if offload is None:
            return 0, 0
        return offload.totals.offloaded_bytes, offload.totals.refused_bytes

    def _where(self) -> str:
        """For what fails in waits of Megatron's own, which know nothing of steps and slots."""
        record = self.record
        return (
            f"HDP: this was rank {torch.distributed.get_rank()} (HDP rank {record.rank}, pipeline "
            f"stage {record.pipeline_stage}) in step {record.step} of {record.kind}, with "
            f"{len(record.forwards)} of {len(self.order.forwards)} forwards done."
        )

    def _stage_order(self) -> StageOrder:
        count = len(self.micro_batches)
        if len(self.chunks) == 1:
            return StageOrder.one_forward_one_backward(count)
        return StageOrder.interleaved(
            count,
            len(self.chunks),
            self.config.microbatch_group_size_per_vp_stage,
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )

    def _plan_pipeline_shapes(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("p2p_communicator") is not None:
            return
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
        divisor = tensor_parallel if self.config.sequence_parallel else 1
        groups = kwargs.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
        kwargs["pg_collection"] = groups
        kwargs["p2p_communicator"] = PlannedShapes(
            groups.pp,
            self.config,
            [layout.num_tokens // divisor for layout in self.step.layouts],
            self.config.hidden_size,
            self.order,
        )

    def _forward_step(self, forward_step: ForwardStep) -> ForwardStep:
        """The k-th call works on the order's k-th micro-batch."""
        remaining = iter([self.micro_batches[slot] for slot in self.order.forwards])

        @functools.wraps(forward_step)
        def run_one(data_iterator: Any, model: Any, *args: Any) -> Any:
            micro_batch = next(remaining)
            begun = time.time()
            with running(micro_batch):
                output, loss_func = forward_step(data_iterator, model, *args)
            self.record.forwards.append((begun, time.time()))
            return output, _checked(loss_func)

        return run_one


def _checked(loss_func: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses a loss function that averages itself: only sums over tokens are plan-invariant."""

    @functools.wraps(loss_func)
    def run(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = loss_func(output, *args, **kwargs)
        if not kwargs.get("non_loss_data", False) and len(result) != 3:
            raise RuntimeError(
                f"the script's loss function returned {len(result)} values, which averages over "
                f"micro-batches: HDP needs (sum of token losses, number of tokens, report)."
            )
        return result

    return run


def _loss_totals(reports: Any) -> tuple[float, float]:
    """(sum of token losses, tokens) over this rank's micro-batches; Megatron's two-value form."""
    totals = [value for report in reports or () for value in report.values() if value.numel() == 2]
    if not totals:
        return 0.0, 0.0
    total = torch.stack([value.view(-1).double() for value in totals]).sum(0)
    return float(total[0]), float(total[1])


def _slot_record(layout: Any) -> dict[str, object]:
    return {
        "ring": list(layout.ring or ()),
        "head_degree": layout.head_degree,
        "ring_tokens": layout.ring_tokens,
        "local_tokens": layout.num_tokens - layout.ring_tokens - layout.padding,
    }


def _count_real_tokens(micro_batches: Iterable[MicroBatch], rank: int) -> None:
    """Feeds Megatron's FLOPs and token statistics (`update_seqlen_stats_from_cu_seqlens`).

    Every rank must call it, or the WORLD all_reduce behind it hangs. A ring's sequence is counted
    by its first member; Megatron divides by the static CP size, so each length enters CP times.
    """
    from megatron.training import training

    lengths = []
    for micro_batch in micro_batches:
        lengths += [sequence.length for sequence in micro_batch.local_sequences]
        if micro_batch.ring is not None and micro_batch.ring.ranks[0] == rank:
            lengths += [sequence.length for sequence in micro_batch.ring_sequences]
    repeated = [0] + lengths * parallel_state.get_context_parallel_world_size()
    training.update_seqlen_stats_from_cu_seqlens(
        torch.cumsum(torch.tensor(repeated if lengths else [0, 0]), 0)
    )
