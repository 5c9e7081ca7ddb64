# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Packs of whole documents as a Megatron dataset.

Built by Megatron's own BlendedMegatronDatasetBuilder, so `--data-path`, `--split`, blend weights
and the index cache mean what they mean for GPTDataset.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from numpy.typing import NDArray

from megatron_hdp.data.corpus import check_lengths
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.long_documents import cut_or_drop
from megatron_hdp.data.packing import build_epochs

logger = logging.getLogger(__name__)


@dataclass
class PackDatasetConfig(GPTDatasetConfig):
    """GPTDataset's options, and what is HDP's own."""

    hdp_long_documents: str = "fail"
    """What becomes of documents longer than the context (long_documents.LONG_DOCUMENTS)."""


class DocumentPackDataset(GPTDataset):
    """Item k is the k-th pack: whole documents, at most `config.sequence_length` tokens.

    Documents are shuffled per epoch by (`config.random_seed`, epoch); empty ones are left out, and
    those longer than the context are refused, cut or dropped (`PackDatasetConfig`). There are packs
    for `num_samples` times the context's tokens, so that a blend by tokens has enough of them.
    Tokens are read by HDP's iterator, piece by piece, never through `dataset[k]`.
    """

    document_index: NDArray[np.int64]
    """[2, E*n] document in the IndexedDataset and first token of it, of each sequence, in order."""
    sample_index: NDArray[np.int64]
    """[P+1] pack k is document_index[:, sample_index[k] : sample_index[k+1]]."""

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        raise TypeError(
            "DocumentPackDataset is read by megatron_hdp's data iterator: "
            "call megatron_hdp.enable() before Megatron builds its data iterators."
        )

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """Loads or builds (document_index, sample_index, None); called by GPTDataset.__init__."""
        paths = self._cache_paths()
        if paths is None:
            return *self._build(), None
        if not all(map(os.path.isfile, paths)):
            for path, array in zip(paths, self._build(), strict=True):
                _save_atomically(path, array)
        # Mapped where they were built too: shared with the other ranks, and sent as their path.
        order, starts = (np.load(path, mmap_mode="r") for path in paths)
        return order, starts, None

    def sequence_lengths(self, start: int, stop: int) -> NDArray[np.int64]:
        """[stop - start] tokens of the sequences `start` .. `stop`-1 of the reading order."""
        documents, firsts = self.document_index[:, start:stop]
        rest = np.asarray(self.dataset.sequence_lengths[documents], np.int64) - firsts
        return np.minimum(rest, self.config.sequence_length)

    def pack_tokens(self) -> NDArray[np.int64]:
        """[P] tokens of every pack."""
        ends = np.cumsum(self.sequence_lengths(0, int(self.sample_index[-1])))
        return np.diff(ends[self.sample_index[1:] - 1], prepend=0)

    def _build(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        config, name = self.config, str(self.dataset_path)
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices].astype(np.int64)
        policy = getattr(config, "hdp_long_documents", "fail")
        if policy == "fail":
            check_lengths(lengths, config.sequence_length, name)
        pieces, long = cut_or_drop(
            np.asarray(self.indices, np.int64), lengths, config.sequence_length, policy, name
        )
        if not len(pieces.length):
            raise CorpusError(f"--data-path {name}: no document is left in this split.")
        if long:
            logger.warning(
                "hdp: %s: %d of %d documents longer than --seq-length %d: %s",
                name, long, len(lengths), config.sequence_length, policy,
            )  # fmt: skip
        order, starts = build_epochs(
            pieces.length, config.sequence_length, config.random_seed, self.num_samples
        )
        return np.stack([pieces.document[order], pieces.start[order]]), starts

    def _cache_paths(self) -> tuple[str, str] | None:
        cache = self.config.path_to_cache
        if cache is None:
            prefix = getattr(self.dataset, "path_prefix", None)
            if prefix is None:
                return None
            cache = os.path.join(prefix, "cache", f"{type(self).__name__}_indices")
        # Megatron's hash knows the path, not what is there: a corpus built again must not find it.
        lengths = np.ascontiguousarray(self.dataset.sequence_lengths)
        content = hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()
        policy = getattr(self.config, "hdp_long_documents", "fail")
        name = f"{type(self).__name__}-{self.index_split.name}-{policy}"
        base = f"{self.unique_description_hash}-{content}-{name}"
        return (
            os.path.join(cache, f"{base}-sequence_index.npy"),
            os.path.join(cache, f"{base}-pack_index.npy"),
        )


def _save_atomically(path: str, array: NDArray[np.int64]) -> None:
    """Ranks of several hosts may build the same index at once; none may see half a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.tmp"
    with open(temporary, "wb") as stream:
        np.save(stream, array)
    os.replace(temporary, path)
