# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Turns a folder of text or code, or a jsonl file, into a Megatron corpus (.bin and .idx).

One document a sequence, an end-of-document token behind each. Without --tokenizer-type a byte-level
BPE is trained on the documents themselves (Hugging Face tokenizers, no download) and saved beside
the corpus; any tokenizer that Megatron knows can be given instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

console = Console(stderr=True)
_BATCH = 256


class Encoder(NamedTuple):
    """Text to token ids, without the end-of-document token."""

    encode: Callable[[list[str]], list[list[int]]]
    eod: int
    train_with: str
    """The tokenizer arguments of a training run on this corpus."""


class Counts(NamedTuple):
    """What became of the documents."""

    lengths: np.ndarray
    cut: int
    dropped: int
    empty: int


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; Megatron's own tokenizer arguments pass through."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, nargs="+", help="folders, or .jsonl files")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--pattern", default="*", help="file names to take from a folder")
    parser.add_argument("--json-key", default="text", help="field that holds a jsonl line's text")
    parser.add_argument("--bpe-vocab-size", type=int, default=4096,
                        help="vocabulary of the BPE, end of document included")  # fmt: skip
    parser.add_argument("--max-length", type=int, help="tokens per document, end included")
    parser.add_argument("--too-long", choices=("cut", "drop"), default="cut",
                        help="what happens to documents over --max-length")  # fmt: skip
    parser.add_argument("--sample", type=int, help="take so many documents, spread by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--picture", help="writes the length histogram as a PNG")
    parser.add_argument("--tokenizer-type", help="a Megatron tokenizer instead of a BPE")
    args, args.tokenizer_arguments = parser.parse_known_args(argv)
    if args.tokenizer_type is None and args.tokenizer_arguments:
        parser.error(f"unrecognized arguments: {' '.join(args.tokenizer_arguments)}")
    if args.max_length is not None and args.max_length < 1:
        parser.error(f"--max-length {args.max_length}: a document has at least one token")
    if args.bpe_vocab_size < 258:
        parser.error(f"--bpe-vocab-size {args.bpe_vocab_size}: 256 bytes and two more at least")
    return args


def documents(args: argparse.Namespace) -> Iterator[str]:
    """The texts that are not blank, in an order that depends on file names alone."""
    for given in args.input:
        path = Path(given)
        if path.is_dir():
            texts = _folder(path, args.pattern)
        elif path.suffix == ".jsonl" and path.is_file():
            texts = _jsonl(path, args.json_key)
        else:
            raise SystemExit(f"--input {path}: give a folder or an existing .jsonl file.")
        yield from (text for text in texts if text.strip())


def _folder(path: Path, pattern: str) -> Iterator[str]:
    for file in sorted(path.rglob(pattern)):
        if file.is_file():
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # not text


def _jsonl(path: Path, key: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise SystemExit(
                    f"--input {path}: line {number} is no JSON object with the field {key!r}: "
                    f"mend it or name the field with --json-key."
                ) from error
            yield str(text)


def sampled(texts: list[str], count: int | None, seed: int) -> list[str]:
    """`count` of the texts in their order, chosen by `seed`; all when None."""
    if count is None or count >= len(texts):
        return texts
    chosen = np.random.RandomState(seed).permutation(len(texts))[:count]
    return [texts[i] for i in np.sort(chosen)]


def train_bpe(texts: list[str], vocab_size: int, prefix: Path) -> Encoder:
    """A byte-level BPE over `texts`; the end-of-document token is the last id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=console.is_terminal,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endofdocument|>"])
    tokenizer.save(f"{prefix}.tokenizer.json")
    eod = tokenizer.token_to_id("<|endofdocument|>")

    def encode(batch: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(batch)]

    return Encoder(encode, eod, f"--tokenizer-type NullTokenizer --vocab-size {eod + 1}")


def megatron_tokenizer(args: argparse.Namespace) -> Encoder:
    """The tokenizer that Megatron builds from its own arguments."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args

    given = ["--tokenizer-type", args.tokenizer_type, *args.tokenizer_arguments]
    sys.argv = [sys.argv[0], *given]
    tokenizer = build_tokenizer(parse_args())
    return Encoder(
        lambda batch: [list(tokenizer.tokenize(text)) for text in batch],
        int(tokenizer.eod),
        " ".join(given),
    )


def write(texts: list[str], encoder: Encoder, args: argparse.Namespace) -> Counts:
    """Encodes and writes the pair of files through Megatron's IndexedDatasetBuilder."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = args.output_prefix
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(encoder.eod + 1))
    lengths: list[int] = []
    cut = dropped = empty = 0
    batches = [texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)]
    for batch in track(batches, description="encoding", console=console):
        for ids in encoder.encode(batch):
            empty += not ids
            over = args.max_length is not None and len(ids) + 1 > args.max_length
            if over and args.too_long == "drop":
                dropped += 1
                continue
            cut += over
            tokens = [*ids[: args.max_length - 1 if over else None], encoder.eod]
            builder.add_item(torch.tensor(tokens))
            builder.end_document()
            lengths.append(len(tokens))
    builder.finalize(f"{prefix}.idx")
    return Counts(np.asarray(lengths), cut, dropped, empty)


def histogram(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(upper bounds, documents, tokens) per power of two."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    bins = np.arange(powers.min(), powers.max() + 1)
    counts = np.array([(powers == power).sum() for power in bins])
    tokens = np.array([lengths[powers == power].sum() for power in bins])
    return 2**bins, counts, tokens


def show(counts: Counts, args: argparse.Namespace, encoder: Encoder) -> None:
    """Prints the histogram and how to train; draws it when asked to."""
    from rich.table import Table

    lengths = counts.lengths
    bounds, documents_, tokens = histogram(lengths)
    table = Table("tokens up to", "documents", "share of tokens", "")
    for bound, count, total in zip(bounds, documents_, tokens, strict=True):
        share = total / lengths.sum()
        table.add_row(f"{bound:,}", f"{count:,}", f"{100 * share:.1f} %", "#" * round(50 * share))
    out = Console()
    out.print(table)
    print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens, longest {lengths.max():,}; "
        f"{counts.cut} cut and {counts.dropped} dropped at --max-length, {counts.empty} empty"
    )
    print(f"train with: --data-path {args.output_prefix} {encoder.train_with}")
    if args.picture:
        _draw(lengths, args.picture)


def _draw(lengths: np.ndarray, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bounds, documents_, tokens = histogram(lengths)
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    places = np.arange(len(bounds))
    axes.bar(places - 0.2, 100 * documents_ / documents_.sum(), 0.4, label="documents")
    axes.bar(places + 0.2, 100 * tokens / tokens.sum(), 0.4, label="tokens")
    axes.set_xticks(places, [f"{bound:,}" for bound in bounds], rotation=45)
    axes.set_xlabel("document length, tokens up to")
    axes.set_ylabel("share (%)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Builds the corpus; returns the exit code."""
    args = parse_arguments(argv)
    texts = sampled(list(documents(args)), args.sample, args.seed)
    if not texts:
        raise SystemExit(
            f"--input {' '.join(args.input)}: no text found (pattern {args.pattern!r})."
        )
    prefix = Path(args.output_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    import torch

    if not torch.cuda.is_available():
        from megatron_hdp import cpu

        cpu.install()
    if args.tokenizer_type is None:
        encoder = train_bpe(texts, args.bpe_vocab_size, prefix)
    else:
        encoder = megatron_tokenizer(args)
    counts = write(texts, encoder, args)
    if not len(counts.lengths):
        raise SystemExit(f"--max-length {args.max_length} drops every document: raise it.")
    show(counts, args, encoder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
