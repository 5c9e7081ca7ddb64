# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The length histogram of a corpus, as a table and as a picture."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table


class Histogram(NamedTuple):
    """Per power of two: lengths in (bound / 2, bound]."""

    bounds: NDArray[np.int64]
    documents: NDArray[np.int64]
    tokens: NDArray[np.int64]


def histogram(lengths: NDArray[np.int64]) -> Histogram:
    """Counts of documents and of their tokens; `lengths` [n], each at least 1, n at least 1."""
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    bins = np.arange(powers.min(), powers.max() + 1)
    documents = np.array([(powers == power).sum() for power in bins])
    tokens = np.array([lengths[powers == power].sum() for power in bins])
    return Histogram(2**bins, documents, tokens)


def length_table(lengths: NDArray[np.int64]) -> Table:
    """The histogram with a bar per row for the share of tokens."""
    table = Table()
    for heading in ("tokens up to", "documents", "share of tokens"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for bound, documents, tokens in zip(*histogram(lengths), strict=True):
        share = tokens / lengths.sum()
        bar = "#" * round(50 * share)
        table.add_row(f"{bound:,}", f"{documents:,}", f"{100 * share:.1f} %", bar)
    return table


def draw_lengths(lengths: NDArray[np.int64], path: str) -> None:
    """Writes the histogram as a PNG: share of documents and of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bounds, documents, tokens = histogram(lengths)
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    places = np.arange(len(bounds))
    axes.bar(places - 0.2, 100 * documents / documents.sum(), 0.4, label="documents")
    axes.bar(places + 0.2, 100 * tokens / tokens.sum(), 0.4, label="tokens")
    axes.set_xticks(places, [f"{bound:,}" for bound in bounds], rotation=45)
    axes.set_xlabel("document length, tokens up to")
    axes.set_ylabel("share (%)")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
