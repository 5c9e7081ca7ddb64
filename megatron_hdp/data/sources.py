# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Where a step's sequences come from: packs of whole documents, or Megatron's own samples.

A source answers two questions: how long are the sequences of pack k (no token is read), and what
are the tokens of one piece of one sequence (nothing else is read).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from numpy.typing import NDArray

from megatron_hdp.data.blend_order import order_by_tokens
from megatron_hdp.data.corpus import fingerprint
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.pack_dataset import DocumentPackDataset

SEQUENCES_PER_PACK = 1 << 24
"""Sequence ids are pack * 2^24 + position in the pack: unique in a step, and they tell the pack."""


class Piece(NamedTuple):
    """Tokens of one range of one sequence, all int64 or float32 [stop - start]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


class PackSource(ABC):
    """A numbered list of packs. `fingerprint` tells corpora apart across ranks."""

    fingerprint: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of packs."""

    @abstractmethod
    def lengths(self, pack: int) -> NDArray[np.int64]:
        """[n] tokens of the pack's sequences, in order, each at least 1."""

    @abstractmethod
    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        """Tokens start .. stop-1 of the pack's sequence `position`, with their labels."""

    @abstractmethod
    def document(self, pack: int, position: int) -> int:
        """The index, in its IndexedDataset, of the document that the sequence begins in."""

    def state(self, pack: int) -> dict[str, Any] | None:
        """What `restore` needs to go on at a pack without walking there; None: nothing."""
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where another run's `state` was taken.

        Raises:
            CorpusError: that run had other data.
        """
        raise CorpusError(f"{type(self).__name__} keeps no state")

    def close(self) -> None:  # noqa: B027 - most sources have nothing to end
        """Ends what works for the source. Idempotent."""

    def read_sequence(self, sequence_id: int, start: int, stop: int) -> Piece:
        return self.read(*divmod(sequence_id, SEQUENCES_PER_PACK), start, stop)


class DocumentSource(PackSource):
    """Packs of whole documents. The last token of a document has no target: its loss is masked."""

    def __init__(self, dataset: DocumentPackDataset) -> None:
        self._dataset = dataset
        self.fingerprint = fingerprint(dataset.dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def lengths(self, pack: int) -> NDArray[np.int64]:
        return self._dataset.sequence_lengths(*self._dataset.sample_index[pack : pack + 2])

    def document(self, pack: int, position: int) -> int:
        return int(self._dataset.document_index[0, self._dataset.sample_index[pack] + position])

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        at = self._dataset.sample_index[pack] + position
        document, first = map(int, self._dataset.document_index[:, at])
        corpus = self._dataset.dataset
        begin, length = first + start, int(corpus.sequence_lengths[document])
        # Behind a cut the document goes on, so its last token has a target there.
        last = min(first + stop + 1, length)
        text = corpus.get(document, offset=begin, length=last - begin).astype(np.int64)
        labels = np.zeros(stop - start, np.int64)
        labels[: last - begin - 1] = text[1:]
        loss_mask = np.ones(stop - start, np.float32)
        loss_mask[last - begin - 1 :] = 0.0
        tokens = text[: stop - start]
        return _masked(self._dataset, tokens, labels, loss_mask)


class SampleSource(PackSource):
    """A GPTDataset's own samples, token for token what Megatron would train on.

    With inter-document masking a sample's documents are its sequences; without it attention
    crosses documents in Megatron, so the sample is one sequence.
    """

    def __init__(self, dataset: GPTDataset) -> None:
        self._dataset = dataset
        self._split = bool(dataset.config.inter_document_masking)
        self._extra = int(dataset.config.add_extra_token_to_sequence)
        self.fingerprint = fingerprint(dataset.dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def _parts(self, pack: int) -> list[tuple[int, int, int]]:
        """(document, first token, number of tokens) of the sample's text, in order.

        The text is one token longer than the inputs when labels need an extra token, which may be
        the only one of the last document.
        """
        dataset = self._dataset
        if dataset.shuffle_index is None:
            raise CorpusError("--defer-npy-index-mmap is not supported with HDP: leave it out.")
        sample = dataset.shuffle_index[pack]
        (first, begin), (last, end) = (
            map(int, row) for row in dataset.sample_index[sample : sample + 2]
        )
        documents = [int(d) for d in dataset.document_index[first : last + 1]]
        lengths = dataset.dataset.sequence_lengths
        parts = []
        for i, document in enumerate(documents):
            start = begin if i == 0 else 0
            stop = end + self._extra if i == len(documents) - 1 else int(lengths[document])
            parts.append((document, start, stop - start))
        return parts

    def lengths(self, pack: int) -> NDArray[np.int64]:
        counts = np.array([count for _, _, count in self._parts(pack)], np.int64)
        counts[-1] -= self._extra
        return counts[counts > 0] if self._split else counts.sum(keepdims=True)

    def document(self, pack: int, position: int) -> int:
        return self._parts(pack)[position if self._split else 0][0]

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        offset = int(self.lengths(pack)[:position].sum())
        text = self._text(pack, offset + start, offset + stop + 1)
        tokens, labels = text[:-1].copy(), text[1:].copy()
        pad = self._dataset._pad_token_id
        loss_mask = np.where(labels == pad, 0.0, 1.0).astype(np.float32)
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
        return _masked(self._dataset, tokens, labels, loss_mask)

    def _text(self, pack: int, start: int, stop: int) -> NDArray[np.int64]:
        """Sample positions start .. stop-1; past the end of the text it is padding."""
        text = np.full(stop - start, self._dataset._pad_token_id, np.int64)
        at = 0
        for document, first, count in self._parts(pack):
            low, high = max(start, at), min(stop, at + count)
            if low < high:
                text[low - start : high - start] = self._dataset.dataset.get(
                    document, offset=first + low - at, length=high - low
                )
            at += count
        return text


class BlendSource(PackSource):
    """A BlendedDataset. Of samples pack k is the one that its index says, as in Megatron; packs of
    documents are ordered anew, so that the weights hold in tokens (`blend_order.order_by_tokens`).
    """

    def __init__(self, dataset: BlendedDataset) -> None:
        self._length = len(dataset)
        self._sources = [source_of(part) for part in dataset.datasets]
        self._part, self._index = dataset.dataset_index, dataset.dataset_sample_index
        parts = dataset.datasets
        # Whole numbers are how many samples to take of each, not shares.
        shares = isinstance(dataset.weights[0], float)
        if shares and all(isinstance(part, DocumentPackDataset) for part in parts):
            tokens = [part.pack_tokens() for part in parts]
            weights = np.asarray(dataset.weights, np.float64)
            self._part, self._index = order_by_tokens(tokens, weights, self._length)
        joined = "".join(source.fingerprint for source in self._sources)
        self.fingerprint = hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._length

    def _locate(self, pack: int) -> tuple[PackSource, int]:
        return self._sources[int(self._part[pack])], int(self._index[pack])

    def lengths(self, pack: int) -> NDArray[np.int64]:
        source, index = self._locate(pack)
        return source.lengths(index)

    def document(self, pack: int, position: int) -> int:
        source, index = self._locate(pack)
        return source.document(index, position)

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        source, index = self._locate(pack)
        return source.read(index, position, start, stop)


def source_of(dataset: object) -> PackSource:
    """The source that reads a dataset which a Megatron dataset provider returned.

    Raises:
        CorpusError: the dataset's class is not known.
    """
    if isinstance(dataset, PackSource):
        return dataset
    if isinstance(dataset, DocumentPackDataset):
        return DocumentSource(dataset)
    if isinstance(dataset, BlendedDataset):
        return BlendSource(dataset)
    # A subclass may change its samples in __getitem__ (FIM does), which piecewise reads bypass.
    if type(dataset) in (GPTDataset, MockGPTDataset):
        return SampleSource(dataset)
    raise CorpusError(
        f"the dataset provider returned a {type(dataset).__name__}, which HDP cannot plan for: "
        f"return a GPTDataset, a BlendedDataset, or a megatron_hdp.data.sources.PackSource."
    )


def _masked(
    dataset: GPTDataset,
    tokens: NDArray[np.int64],
    labels: NDArray[np.int64],
    loss_mask: NDArray[np.float32],
) -> Piece:
    if dataset.config.eod_mask_loss:
        loss_mask = np.where(tokens == dataset.config.tokenizer.eod, np.float32(0.0), loss_mask)
    return Piece(tokens, labels, loss_mask)
