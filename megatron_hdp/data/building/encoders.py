# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Text to token ids: a BPE trained on the corpus itself, or a tokenizer that Megatron knows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hdp.data.building.texts import Texts
from megatron_hdp.data.errors import CorpusError

END_OF_DOCUMENT = "<|endofdocument|>"
SMALLEST_BPE = 257
"""One id a byte, and the end of a document."""


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, as the corpus needs it."""

    encode: Callable[[list[str]], list[list[int]]]
    """Ids of each text, without the end of document."""
    eod: int
    vocab_size: int
    """All ids are below it, `eod` included."""
    train_with: str
    """The tokenizer arguments of a training run on the corpus."""


def train_bpe(texts: Texts, vocab_size: int, path: str) -> Encoder:
    """A byte-level BPE over the texts; the end of a document is the last id.

    Args:
        vocab_size: at most so many ids; a small corpus has fewer merges.
        path: where the tokenizer is written (tokenizer.json of Hugging Face tokenizers).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    # Encodes without the special token: a text that quotes it does not end there.
    plain = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    tokenizer.save(path)
    eod = plain.get_vocab_size()

    def encode(batch: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in plain.encode_batch(batch)]

    return Encoder(encode, eod, eod + 1, f"--tokenizer-type NullTokenizer --vocab-size {eod + 1}")


def megatron_tokenizer(arguments: Sequence[str]) -> Encoder:
    """The tokenizer that Megatron builds from its own arguments.

    Args:
        arguments: as on a training command line, `--tokenizer-type` among them.

    Raises:
        CorpusError: an argument is not Megatron's, or the tokenizer cannot be built or has no end
            of document.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    given = " ".join(arguments)
    args = _megatron_arguments(arguments)
    args.pad_vocab_size = False  # for the model's embedding, which is not built here
    try:
        tokenizer = build_tokenizer(args)
        eod, vocab_size = int(tokenizer.eod), int(tokenizer.vocab_size)
    except Exception as error:  # whatever the tokenizer's library raises
        raise CorpusError(
            f"{given}: Megatron cannot build this tokenizer ({type(error).__name__}: {error}): see "
            f"--tokenizer-type and --tokenizer-model in Megatron's arguments."
        ) from error
    return Encoder(
        lambda batch: [list(tokenizer.tokenize(text)) for text in batch], eod, vocab_size, given
    )


def _megatron_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    try:
        args, unknown = add_megatron_arguments(parser).parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise CorpusError(f"{' '.join(arguments)}: {error}.") from error
    if unknown:
        raise CorpusError(
            f"{' '.join(unknown)}: neither an argument of this tool nor one of Megatron's."
        )
    return args
