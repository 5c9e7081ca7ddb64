# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Builds HDP's data iterators from the datasets that a script's own provider returns."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron_hdp import cpu
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.requests import Steps
from megatron_hdp.data.sources import PackSource, source_of
from megatron_hdp.planning import PlanError
from megatron_hdp.planning.degrees import ratio_that_fits
from megatron_hdp.runtime.agreement import Agreement
from megatron_hdp.runtime.attention.kernels import describe_choice
from megatron_hdp.runtime.attention.support import attention_window, replaced_choices
from megatron_hdp.runtime.attention.te_partition import te_layout
from megatron_hdp.runtime.cross_entropy.choice import choose_loss, refused_capacity
from megatron_hdp.runtime.loading import StreamData, make_loaders
from megatron_hdp.runtime.model_shape import head_shape
from megatron_hdp.runtime.options import HdpOptions
from megatron_hdp.runtime.planner import planner_config
from megatron_hdp.runtime.session import Session, Streams
from megatron_hdp.runtime.settings import shared_settings
from megatron_hdp.runtime.sharding import MicroBatchLayout
from megatron_hdp.runtime.step import HdpDataIterator, StreamConfig
from megatron_hdp.runtime.text import restore_data_state, text_provider
from megatron_hdp.runtime.validation import ArgumentRefused, check_capacity

Provider = Callable[..., Any]


def build_hdp_iterators(
    provider: Provider, session: Session, build: Callable[[Provider], Any]
) -> Any:
    """(train, valid, test) iterators, each a RerunDataIterator around an HdpDataIterator or None.

    Megatron's own function does the rest (consumed samples, do_train flags, rerun wrapping): it is
    handed a provider of ready iterators and told that the loader is external.
    """
    from megatron.training import get_args

    args = get_args()
    chunk = getattr(provider, "keywords", {}).get("vp_stage")
    if chunk and session.streams is not None:  # Megatron asks once per model chunk
        return build(_provider_of(session.streams))
    _check_longest(args, session)
    _check_memory(args, session)
    _announce(session, args)
    args.dataloader_type = "external"
    provider = text_provider(provider, session.options, args)
    session.streams = None
    return build(_iterator_provider(provider, session, args))


def _provider_of(streams: Streams) -> Provider:
    def provide(num_samples: Any) -> Streams:
        return streams

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _check_longest(args: Namespace, session: Session) -> None:
    """Raises ArgumentRefused when a sequence of the context length fits no plan."""
    size = session.require_domain().size
    refusal = check_capacity(args, size)
    if refusal is not None and session.options.offload:
        try:
            ratio_that_fits(args.seq_length, planner_config(args, session.options, size))
            return
        except PlanError as error:
            refusal = f"--seq-length {args.seq_length}: {error}."
    if refusal is not None:
        raise ArgumentRefused(f"megatron_hdp: {refusal}")


def _check_memory(args: Namespace, session: Session) -> None:
    """Raises ArgumentRefused when a full micro-batch and its loss cannot fit the device."""
    refusal = refused_capacity(session.options, args)
    if refusal is not None:
        raise ArgumentRefused(f"megatron_hdp: {refusal}")


def _announce(session: Session, args: Namespace) -> None:
    """One line at the start: what was chosen for the user."""
    from megatron.training import print_rank_0

    options, size = session.options, session.require_domain().size
    config = planner_config(args, options, size)
    attention = describe_choice(
        options.attention,
        device=torch.device("cpu" if cpu.is_installed() else "cuda"),
        dtype=args.params_dtype,
        head_dim=args.kv_channels,
        windowed=attention_window(args) is not None,
    )
    print_rank_0(
        f"hdp: domain of {size} ranks, capacity {config.capacity} tokens, strategy "
        f"{config.strategy}, cost model {config.cost().name}, attention {attention}, "
        f"cross-entropy {choose_loss(options, args).mode}{_head_parallel(args, options)}"
    )
    # CPU mode chooses a backend for Megatron itself; Transformer Engine's attention reads them.
    if cpu.is_installed() or options.uses_transformer_engine:
        return
    replaced = replaced_choices(args)
    if replaced is not None:
        print_rank_0(f"hdp: {replaced}")


def _head_parallel(args: Namespace, options: HdpOptions) -> str:
    if options.head_parallel == "off":
        return ""
    shape = head_shape(args)
    degrees = ", ".join(map(str, shape.degrees()))
    heads = f"{shape.heads} heads on {shape.groups}"
    return f", {heads} split over {degrees} of a ring" if degrees else f", {heads} stay whole"


def _iterator_provider(provider: Provider, session: Session, args: Namespace) -> Provider:
    def provide(num_samples: Any, *more: Any, **kwargs: Any) -> Streams:
        with _built_on_every_rank():
            train, valid, test = provider(num_samples, *more, **kwargs)
        batch, eval_batch = args.global_batch_size, args.eval_global_batch_size
        consumed = args.consumed_train_samples, args.consumed_valid_samples
        streams = (
            _Stream("train", train, batch, consumed[0]),
            _Stream("valid", valid, eval_batch, consumed[1]),
            _Stream("test", test, eval_batch, 0),
        )
        training, valid, test = _iterators(streams, session, args)
        if training is not None and args.train_iters:
            training.prefetch()
        session.streams = training, valid, test
        return session.streams

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


@contextmanager
def _built_on_every_rank() -> Iterator[None]:
    """While the script's provider runs, Megatron's dataset builder builds on every rank.

    Upstream scripts build on TP rank 0 of the first and last stage only, and broadcast; with HDP
    every rank reads its own tokens, and every stage needs the lengths.
    """
    original = BlendedMegatronDatasetBuilder.__init__

    @functools.wraps(original)
    def build_here(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any) -> None:
        original(self, cls, sizes, lambda: True, config)

    BlendedMegatronDatasetBuilder.__init__ = build_here
    try:
        yield
    finally:
        BlendedMegatronDatasetBuilder.__init__ = original


class _Stream(NamedTuple):
    name: str
    dataset: Any
    packs_per_step: int
    consumed: int
    """Packs that earlier runs took, from the checkpoint."""


def _iterators(
    streams: Sequence[_Stream], session: Session, args: Namespace
) -> list[HdpDataIterator | None]:
    """One for every stream that has a dataset; called by all ranks of the world."""
    domain = session.require_domain()
    config = planner_config(args, session.options, domain.size)
    settings = shared_settings(args, config)
    # auto's choice rests on the device's memory, which no argument tells.
    settings["chosen loss"] = repr(choose_loss(session.options, args))
    timeout = timedelta(minutes=session.options.timeout_minutes)
    agreements = {stream.name: Agreement(stream.name, timeout, settings) for stream in streams}
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    data = {
        stream.name: StreamData(
            *_steps_and_source(stream, args),
            StreamConfig(
                name=stream.name,
                first_step=stream.consumed // stream.packs_per_step,
                rank=domain.rank,
                multiple_of=tensor_parallel if args.sequence_parallel else 1,
                timeout_s=timeout.total_seconds(),
                config_text=repr(sorted(settings.items())),
                layout=te_layout
                if session.options.uses_transformer_engine
                else MicroBatchLayout.build,
            ),
        )
        for stream in streams
        if stream.dataset is not None
    }
    loaders = make_loaders(data, config, session)
    return [
        HdpDataIterator(loaders[stream.name], agreements[stream.name], data[stream.name].config)
        if stream.name in loaders
        else None
        for stream in streams
    ]


def _steps_and_source(stream: _Stream, args: Namespace) -> tuple[Steps, PackSource]:
    if stream.consumed % stream.packs_per_step:
        raise CorpusError(
            f"{stream.consumed} samples of {stream.name} were consumed, which is no multiple of "
            f"the global batch size {stream.packs_per_step}: keep --global-batch-size as it was "
            f"in the checkpoint."
        )
    source = source_of(stream.dataset)
    if stream.name == "train":
        restore_data_state(source, stream.consumed, args)
    return Steps(stream.name, stream.packs_per_step, len(source)), source
