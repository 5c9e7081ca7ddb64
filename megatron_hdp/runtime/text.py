# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Text as training data: what takes the place of a script's dataset provider, and its state."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.sources import PackSource
from megatron_hdp.data.streams.files import is_text_path
from megatron_hdp.data.streams.provider import TextOptions, text_sources
from megatron_hdp.runtime.options import HdpOptions

Provider = Callable[..., Any]
STATE_FILE = "train_dataloader_dprank000.pt"
"""Megatron saves one for each data-parallel rank (`maybe_save_dataloader_state`); all are equal."""


def text_provider(provider: Provider, options: HdpOptions, args: Namespace) -> Provider:
    """The script's provider; ours, where a `--data-path` entry is records of text."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    entries = [entry for found in (blend, *(per_split or ())) if found for entry in found[0]]
    if not any(map(is_text_path, entries)):
        return provider
    # Into the checkpoint's own folder; Megatron calls the iterator's save_state.
    args.dataloader_save = args.save

    def provide(num_packs: Any, *_: Any, **__: Any) -> list[PackSource | None]:
        from megatron.training import get_tokenizer

        text_options = TextOptions(
            long_documents=options.long_documents,
            skip_malformed=options.malformed_records == "skip",
            text_key=options.text_key,
            timeout_s=60 * options.timeout_minutes,
        )
        return text_sources(args, get_tokenizer(), blend, per_split, num_packs, text_options)

    return provide


def restore_data_state(source: PackSource, consumed: int, args: Namespace) -> None:
    """Goes on where the checkpoint's data state stands; without one the source walks there.

    Args:
        consumed: packs that were trained on.

    Raises:
        CorpusError: the state belongs to other data.
    """
    from megatron.training.checkpointing import get_checkpoint_name

    if not getattr(args, "dataloader_save", None) or not consumed or not args.load:
        return
    path = get_checkpoint_name(
        args.load, args.iteration, pipeline_parallel=False, tensor_rank=0, pipeline_rank=0,
        expert_parallel=False, expert_rank=0, basename=STATE_FILE,
    )  # fmt: skip
    folder, file = os.path.split(path)
    for found in (path, os.path.join(f"{folder}_000", file)):  # with pipeline stages
        if os.path.isfile(found):
            state = torch.load(found, weights_only=True)["dataloader_state_dict"]
            try:
                if state["pack"] == consumed:
                    source.restore(state)
            except (KeyError, TypeError) as error:
                raise CorpusError(f"{found} is no data state of megatron_hdp: {error}.") from error
            return
