# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Turns folders of text or code, or jsonl files, into a Megatron corpus (.bin and .idx).

One document a sequence, an end-of-document token behind each. Without --tokenizer-type a byte-level
BPE is trained on the documents themselves (Hugging Face tokenizers, no download) and saved as
PREFIX.tokenizer.json; any tokenizer that Megatron knows can be given with Megatron's own arguments
instead. HDP refuses documents longer than the context, so give --max-length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from megatron_hdp.data.building.encoders import (
    SMALLEST_BPE,
    Encoder,
    megatron_tokenizer,
    train_bpe,
)
from megatron_hdp.data.building.lengths import draw_lengths, length_table
from megatron_hdp.data.building.texts import Texts, open_texts
from megatron_hdp.data.errors import CorpusError


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what is not the tool's own is left in `tokenizer_arguments`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, nargs="+", help="folders, or .jsonl files")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--pattern", default="*", help="file names to take from a folder")
    parser.add_argument("--json-key", default="text", help="field that holds a jsonl line's text")
    parser.add_argument("--bpe-vocab-size", type=int, default=4096,
                        help="vocabulary of the BPE, end of document included")  # fmt: skip
    parser.add_argument("--max-length", type=int, help="tokens per document, end included")
    parser.add_argument("--too-long", choices=("cut", "drop"), default="cut",
                        help="what happens to documents over --max-length")  # fmt: skip
    parser.add_argument("--sample", type=int, help="take so many documents, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--picture", help="writes the length histogram as a PNG")
    parser.add_argument("--tokenizer-type", help="a Megatron tokenizer instead of a BPE")
    args, rest = parser.parse_known_args(argv)
    args.tokenizer_arguments = rest
    return args


def check_arguments(args: argparse.Namespace) -> None:
    """Raises CorpusError for what cannot work."""
    if args.tokenizer_type is None and args.tokenizer_arguments:
        raise CorpusError(
            f"{' '.join(args.tokenizer_arguments)}: no argument of this tool; a Megatron "
            f"tokenizer's arguments need --tokenizer-type."
        )
    for flag, value, least in (
        ("--max-length", args.max_length, 1),
        ("--sample", args.sample, 1),
        ("--bpe-vocab-size", args.bpe_vocab_size, SMALLEST_BPE),
    ):
        if value is not None and value < least:
            raise CorpusError(f"{flag} {value}: give at least {least}.")


def make_encoder(args: argparse.Namespace, texts: Texts, console: Console) -> Encoder:
    """The BPE or the Megatron tokenizer that the arguments ask for."""
    if args.tokenizer_type is not None:
        return megatron_tokenizer(
            ["--tokenizer-type", args.tokenizer_type, *args.tokenizer_arguments]
        )
    with console.status(f"training a BPE on {len(texts):,} documents"):
        return train_bpe(texts, args.bpe_vocab_size, f"{args.output_prefix}.tokenizer.json")


def build(args: argparse.Namespace) -> None:
    """Reads, encodes, writes and shows."""
    check_arguments(args)
    texts = open_texts(args.input, args.pattern, args.json_key)
    if args.sample is not None:
        texts = texts.sampled(args.sample, args.seed)
    if next(iter(texts), None) is None:
        raise CorpusError(
            f"--input {' '.join(args.input)}: no text found (--pattern {args.pattern!r})."
        )
    try:
        Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"--output-prefix {args.output_prefix}: {error}.") from error
    _make_megatron_importable()
    from megatron_hdp.data.building.writer import write_corpus

    console = Console(stderr=True)
    encoder = make_encoder(args, texts, console)
    written = write_corpus(
        track(texts, "encoding", total=len(texts), console=console),
        encoder,
        args.output_prefix,
        max_length=args.max_length,
        drop_long=args.too_long == "drop",
    )
    lengths = written.lengths
    Console().print(length_table(lengths))
    print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens, longest {lengths.max():,}; "
        f"{written.cut:,} cut and {written.dropped:,} dropped at --max-length, "
        f"{len(texts) - len(lengths) - written.dropped:,} blank or not UTF-8"
    )
    print(f"train with: --data-path {args.output_prefix} {encoder.train_with}")
    if args.picture:
        draw_lengths(lengths, args.picture)


def _make_megatron_importable() -> None:
    import torch

    if not torch.cuda.is_available():
        from megatron_hdp import cpu

        cpu.install()


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the corpus; a CorpusError becomes one sentence and exit code 1."""
    try:
        build(parse_arguments(argv))
    except CorpusError as error:
        print(f"build_corpus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
