# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Where a step's sequences come from: packs of whole documents, or Megatron's own samples.

A source answers two questions: how long are the sequences of pack k (no token is read), and what
are the tokens of one piece of one sequence (nothing else is read).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from numpy.typing import NDArray

from megatron_hdp.data.blend_order import order_by_tokens
from megatron_hdp.data.corpus import fingerprint
from megatron_hdp.data.errors import CorpusError
from megatron_hdp.data.pack_dataset import DocumentPackDataset
from megatron_hdp.data.piece import Piece
from megatron_hdp.data.requests import SEQUENCES_PER_PACK
from megatron_hdp.data.token_file import TokenFile


class PackSource(ABC):
    """A numbered list of packs. `fingerprint` tells corpora apart across ranks.

    The ray loader pickles it to its servers; arrays that map a file go as the file's path.
    """

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


class _Corpus:
    """The tokens of an IndexedDataset, and what of its dataset's config they are read with."""

    def __init__(self, dataset: GPTDataset) -> None:
        self._dataset = dataset.dataset
        self._file = TokenFile(dataset.dataset)
        self._lengths = dataset.dataset.sequence_lengths
        self.fingerprint = fingerprint(dataset.dataset)
        self._masked = dataset.config.tokenizer.eod if dataset.config.eod_mask_loss else None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lengths": None}  # the file has them

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lengths = self._dataset.sequence_lengths

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[n] tokens of the documents.

        Raises:
            CorpusError: the index was cut short under the run.
        """
        self._file.check_index()
        return self._lengths

    def get(self, document: int, offset: int, length: int) -> NDArray[np.integer]:
        """As `TokenFile.get`."""
        return self._file.get(document, offset, length)

    def masked(
        self,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        loss_mask: NDArray[np.float32],
    ) -> Piece:
        """The piece, with `--eod-mask-loss` where it was asked for."""
        if self._masked is not None:
            loss_mask = np.where(tokens == self._masked, np.float32(0.0), loss_mask)
        return Piece(tokens, labels, loss_mask)


class DocumentSource(PackSource):
    """Packs of whole documents. The last token of a document has no target: its loss is masked."""

    def __init__(self, dataset: DocumentPackDataset) -> None:
        self._corpus = _Corpus(dataset)
        self._documents, self._starts = dataset.document_index, dataset.sample_index
        self._context = dataset.config.sequence_length
        self.fingerprint = self._corpus.fingerprint

    def __len__(self) -> int:
        return len(self._starts) - 1

    def lengths(self, pack: int) -> NDArray[np.int64]:
        start, stop = self._starts[pack : pack + 2]
        documents, firsts = self._documents[:, start:stop]
        rest = np.asarray(self._corpus.lengths[documents], np.int64) - firsts
        return np.minimum(rest, self._context)

    def document(self, pack: int, position: int) -> int:
        return int(self._documents[0, self._starts[pack] + position])

    def read(self, pack: int, position: int, start: int, stop: int) -> Piece:
        document, first = map(int, self._documents[:, self._starts[pack] + position])
        begin, length = first + start, int(self._corpus.lengths[document])
        # Behind a cut the document goes on, so its last token has a target there.
        last = min(first + stop + 1, length)
        text = self._corpus.get(document, begin, last - begin).astype(np.int64)
        labels = np.zeros(stop - start, np.int64)
        labels[: last - begin - 1] = text[1:]
        loss_mask = np.ones(stop - start, np.float32)
        loss_mask[last - begin - 1 :] = 0.0
        return self._corpus.masked(text[: stop - start], labels, loss_mask)


class SampleSource(PackSource):
    """A GPTDataset's own samples, token for token what Megatron would train on.

    With inter-document masking a sample's documents are its sequences; without it attention
    crosses documents in Megatron, so the sample is one sequence.

    Raises:
        CorpusError: the dataset does not hold its index.
    """

    def __init__(self, dataset: GPTDataset) -> None:
        if dataset.shuffle_index is None:
            raise CorpusError("--defer-npy-index-mmap is not supported with HDP: leave it out.")
        self._corpus = _Corpus(dataset)
        self._documents, self._samples = dataset.document_index, dataset.sample_index
        self._shuffle = dataset.shuffle_index
        self._pad = dataset._pad_token_id
        self._length = len(dataset)
        self._split = bool(dataset.config.inter_document_masking)
        self._extra = int(dataset.config.add_extra_token_to_sequence)
        self.fingerprint = self._corpus.fingerprint

    def __len__(self) -> int:
        return self._length

    def _parts(self, pack: int) -> list[tuple[int, int, int]]:
        """(document, first token, number of tokens) of the sample's text, in order.

        The text is one token longer than the inputs when labels need an extra token, which may be
        the only one of the last document.
        """
        sample = self._shuffle[pack]
        (first, begin), (last, end) = (map(int, row) for row in self._samples[sample : sample + 2])
        documents = [int(d) for d in self._documents[first : last + 1]]
        lengths = self._corpus.lengths
        parts = []
        for i, document in enumerate(documents):
            start = begin if i == 0 else 0
            at_end = i == len(documents) - 1
            stop = end + self._extra if at_end else int(lengths[document])
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
        loss_mask = np.where(labels == self._pad, 0.0, 1.0).astype(np.float32)
        tokens[tokens == self._pad] = 0
        labels[labels == self._pad] = 0
        return self._corpus.masked(tokens, labels, loss_mask)

    def _text(self, pack: int, start: int, stop: int) -> NDArray[np.int64]:
        """Sample positions start .. stop-1; past the end of the text it is padding."""
        text = np.full(stop - start, self._pad, np.int64)
        at = 0
        for document, first, count in self._parts(pack):
            low, high = max(start, at), min(stop, at + count)
            if low < high:
                text[low - start : high - start] = self._corpus.get(
                    document, first + low - at, high - low
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
