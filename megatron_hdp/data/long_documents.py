# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What becomes of documents longer than the context: fail, cut into several sequences, or drop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.data.errors import CorpusError

LONG_DOCUMENTS = ("fail", "cut", "drop")


class Pieces(NamedTuple):
    """Sequences as ranges of documents, all int64 [n]."""

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def take(self, order: NDArray[np.int64]) -> Pieces:
        return Pieces(*(column[order] for column in self))


def cut_or_drop(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int64],
    context_length: int,
    policy: str,
    corpus: str,
) -> tuple[Pieces, int]:
    """(sequences, number of documents that were too long). Empty documents are left out.

    Args:
        documents: [n] their numbers; lengths: [n] their tokens.
        policy: one of LONG_DOCUMENTS. A cut loses no token: the parts are sequences of their own.
        corpus: its name, for the message.

    Raises:
        CorpusError: the policy is "fail" and a document is too long.
    """
    long = lengths > context_length
    count = int(long.sum())
    if count and policy == "fail":
        longest = int(lengths.max())
        raise CorpusError(
            f"--seq-length {context_length} is shorter than {count} of {len(lengths)} documents "
            f"of --data-path {corpus} (the longest has {longest} tokens): raise --seq-length to "
            f"{longest}, or pass --hdp-long-documents cut or drop."
        )
    kept = (lengths > 0) & ~long if policy == "drop" else lengths > 0
    documents, lengths = documents[kept], lengths[kept]
    parts = -(-lengths // context_length)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    start = number * context_length
    length = np.minimum(np.repeat(lengths, parts) - start, context_length)
    return Pieces(np.repeat(documents, parts), start, length), count
