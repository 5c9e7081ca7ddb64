# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Records to tokens: documents as they are, conversations with loss on the answers only.

A record with "messages" (or "conversations") is a chat; Megatron's form, several conversations in
one list, is split where a system message begins the next one. Otherwise its text is a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_CHAT_KEYS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles in the from/value form, beside the usual ones."""


class MalformedRecord(ValueError):
    """What is wrong with a record."""


class Encoded(NamedTuple):
    """One sequence."""

    tokens: NDArray[np.int64]
    answers: NDArray[np.uint8] | None
    """[n] 1 where the token is one to be predicted; None: all are."""


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes records with a tokenizer of Megatron's.

    Args:
        tokenizer: has `tokenize(text) -> ids` and `eod`; one of the library "sft" (Megatron's
            SFTTokenizer) renders and masks chats itself, else they are rendered as ChatML.
        text_key: the field of a document's text.
    """

    tokenizer: Any
    text_key: str = "text"

    def __call__(self, record: dict[str, Any]) -> Iterator[Encoded]:
        """The record's sequences.

        Raises:
            MalformedRecord: neither a text nor a chat.
        """
        for key in _CHAT_KEYS:
            if record.get(key) is not None:
                for conversation in _conversations(record[key]):
                    yield self._chat(conversation)
                return
        text = record.get(self.text_key)
        if not isinstance(text, str):
            raise MalformedRecord(
                f'neither "messages" nor a text in "{self.text_key}" (fields: '
                f"{', '.join(sorted(record)) or 'none'})"
            )
        yield Encoded(np.array([*self._ids(text), self.tokenizer.eod], np.int64), None)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.tokenize(text))

    def _chat(self, conversation: list[Message]) -> Encoded:
        if getattr(self.tokenizer, "library", None) == "sft":
            turns = [message._asdict() for message in conversation]
            ids, targets = self.tokenizer.tokenize_conversation(
                turns, return_target=True, add_generation_prompt=False
            )
            return Encoded(np.asarray(ids, np.int64), (np.asarray(targets) >= 0).astype(np.uint8))
        ids, answers = [], []
        for role, content in conversation:
            answer = int(role == "assistant")
            for part, predicted in (
                (f"<|im_start|>{role}\n", 0),
                (f"{content}<|im_end|>", answer),
                ("\n", 0),
            ):
                part_ids = self._ids(part)
                ids += part_ids
                answers += [predicted] * len(part_ids)
        return Encoded(
            np.array([*ids, self.tokenizer.eod], np.int64), np.array([*answers, 0], np.uint8)
        )


def _conversations(messages: Any) -> list[list[Message]]:
    if not isinstance(messages, list) or not messages:
        raise MalformedRecord("messages are no list, or an empty one")
    found: list[list[Message]] = []
    for message in map(_message, messages):
        if not found or (message.role == "system" and found[-1]):
            found.append([])
        found[-1].append(message)
    return found


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise MalformedRecord(f"a message is a {type(message).__name__}, no object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # parts, as multi-modal chats have them
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if whole else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise MalformedRecord("a message without a role and a text")
    return Message(_ROLES.get(role, role), content)
