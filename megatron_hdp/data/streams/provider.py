# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Pack sources for `--data-path` entries that are text, alone or blended with corpora."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.indexed_dataset import get_bin_path
from megatron.core.datasets.utils import normalize

from megatron_hdp.data.blends import TokenBlend
from megatron_hdp.data.pack_dataset import DocumentPackDataset, PackDatasetConfig
from megatron_hdp.data.sources import PackSource, source_of
from megatron_hdp.data.streams.ahead import TokeniseAhead
from megatron_hdp.data.streams.encoding import RecordEncoder
from megatron_hdp.data.streams.files import is_text_path, list_shards
from megatron_hdp.data.streams.source import TextSource
from megatron_hdp.data.streams.store import TokenStore

_AHEAD_RANKS = 2
"""Ranks of a host that tokenise ahead; the others read what these have made."""

Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class TextOptions:
    """What `--hdp-*` arguments say about text."""

    long_documents: str
    skip_malformed: bool
    text_key: str
    timeout_s: float


def text_sources(
    args: Any,
    tokenizer: Any,
    blend: Blend | None,
    blend_per_split: Sequence[Blend | None] | None,
    num_packs: Sequence[int],
    options: TextOptions,
) -> list[PackSource | None]:
    """[train, valid, test] sources.

    Args:
        args: Megatron's, validated.
        blend, blend_per_split: as Megatron's `get_blend_and_blend_per_split` returns them.
        num_packs: [3] packs that each will be asked for.

    Raises:
        CorpusError: a file is missing, or unreadable.
    """
    found: list[PackSource | None] = []
    shares = _shares(args.split) if blend is not None else [(0.0, 1.0)] * 3
    for split, packs in enumerate(num_packs):
        entries = blend if blend is not None else (blend_per_split or [None] * 3)[split]
        low, high = shares[split]
        if entries is None or not packs or high <= low:
            found.append(None)
            continue
        found.append(_blended(args, tokenizer, entries, split, packs, shares[split], options))
    return found


def _blended(
    args: Any,
    tokenizer: Any,
    entries: Blend,
    split: int,
    packs: int,
    share: tuple[float, float],
    options: TextOptions,
) -> PackSource:
    paths, weights = entries
    parts: list[PackSource] = []
    for path in paths:
        if is_text_path(path):
            parts.append(_text(args, tokenizer, path, packs, share, options))
        else:
            parts.append(_corpus(args, tokenizer, path, split, packs, options))
    if len(parts) == 1:
        return parts[0]
    return TokenBlend(parts, weights or [float(_size(path)) for path in paths], packs)


def _text(
    args: Any,
    tokenizer: Any,
    path: str,
    packs: int,
    share: tuple[float, float],
    options: TextOptions,
) -> PackSource:
    shards = list_shards(path)
    folder = args.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(path)), "cache")
    store = TokenStore(
        shards,
        RecordEncoder(tokenizer, options.text_key),
        os.path.join(folder, "TextShards"),
        options.skip_malformed,
        options.timeout_s,
    )
    several = len(shards) > 1 and int(os.environ.get("LOCAL_RANK", 0)) < _AHEAD_RANKS
    return TextSource(
        store,
        context_length=args.seq_length,
        seed=args.seed,
        num_packs=packs,
        share=share,
        long_documents=options.long_documents,
        eod_mask_loss=args.eod_mask_loss,
        ahead=TokeniseAhead(store) if several else None,
    )


def _corpus(
    args: Any, tokenizer: Any, prefix: str, split: int, packs: int, options: TextOptions
) -> PackSource:
    """An IndexedDataset in the blend: its split is Megatron's, by documents in order."""
    per_split = args.data_path is None and args.data_args_path is None
    entry = ([prefix], None)
    config = PackDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if per_split else entry,
        blend_per_split=[entry if i == split else None for i in range(3)] if per_split else None,
        split=None if per_split else args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        hdp_long_documents=options.long_documents,
    )
    sizes = [packs if i == split else 0 for i in range(3)]
    built = BlendedMegatronDatasetBuilder(DocumentPackDataset, sizes, lambda: True, config).build()
    return source_of(built[split])


def _shares(split: str) -> list[tuple[float, float]]:
    """[3] the part of [0, 1) that belongs to train, valid and test."""
    bounds = [0.0]
    for part in normalize(parse_and_normalize_split(split)):
        bounds.append(bounds[-1] + part)
    return list(itertools.pairwise(bounds))


def _size(path: str) -> int:
    """Bytes, for a blend without weights: sources count by what they hold."""
    if not is_text_path(path):
        return os.path.getsize(get_bin_path(path))
    return sum(os.path.getsize(file) for file in {shard.path for shard in list_shards(path)})
