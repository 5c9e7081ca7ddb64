# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Records of text: files, masks of chats, packs, cuts, state, faults."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data.errors import CorpusError
from tests.data.texts import EOD, byte_tokenizer, ids, write

CONTEXT = 64


@pytest.fixture
def tokenizer(tmp_path, megatron_on_cpu):
    return byte_tokenizer(tmp_path)


@pytest.fixture
def source_of_text(tokenizer, tmp_path):
    from megatron_hdp.data.streams.encoding import RecordEncoder
    from megatron_hdp.data.streams.files import list_shards
    from megatron_hdp.data.streams.source import TextSource
    from megatron_hdp.data.streams.store import TokenStore

    def make(path, *, shard_bytes=200, skip=False, cache="cache", **more):
        store = TokenStore(
            list_shards(path, shard_bytes), RecordEncoder(tokenizer), str(tmp_path / cache), skip
        )
        more = {"context_length": CONTEXT, "seed": 5, "num_packs": 1 << 40, **more}
        return TextSource(store, **more)

    return make


def documents(count: int = 60) -> list[str]:
    rng = np.random.RandomState(3)
    return [f"{n}:" + "ab c"[n % 4] * rng.randint(0, CONTEXT - 5) for n in range(count)]


def epoch_of(source, tokens: int) -> list[list[int]]:
    """Token ids of every sequence, until so many tokens have come."""
    found, pack = [], 0
    while tokens > 0:
        lengths = source.lengths(pack)
        assert lengths.sum() <= CONTEXT
        for position, length in enumerate(lengths):
            found.append(source.read(pack, position, 0, int(length)).tokens.tolist())
        tokens -= int(lengths.sum())
        pack += 1
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "saved"])
def test_every_form_gives_every_document_once_an_epoch(source_of_text, tmp_path, name):
    texts = documents()
    path = write(tmp_path / name, [{"text": text} for text in texts])
    source = source_of_text(path)
    wanted = sorted([*ids(text), EOD] for text in texts)
    total = sum(map(len, wanted))
    assert sorted(epoch_of(source, total)) == wanted
    if name != "a.jsonl.gz" and name != "a.jsonl.zst":
        assert len(source._store.shards) > 1
        # The next shard fills the pack that a shard's end leaves open.
        packs = [source.lengths(pack).sum() + source.lengths(pack + 1)[0] for pack in range(8)]
        assert min(packs) > CONTEXT


SAVED = Path(__file__).parent / "saved_by_datasets"
"""What `Dataset.from_list(...).save_to_disk` of Hugging Face's datasets 5.2.0 wrote."""


def test_what_hugging_face_itself_saved(source_of_text, tmp_path):
    """Several shards; chats; contents of mixed types, which datasets stores as JSON strings."""
    texts = [f"{n}:" + "ab c"[n % 4] * (n * 7 % 50) for n in range(20)]
    source = source_of_text(str(SAVED / "texts"))
    assert len(source._store.shards) == 3
    wanted = sorted([*ids(text), EOD] for text in texts)
    assert sorted(epoch_of(source, sum(map(len, wanted)))) == wanted

    source = source_of_text(str(SAVED / "chats"), context_length=512)
    pieces = [source.read(0, at, 0, int(n)) for at, n in enumerate(source.lengths(0))]
    answers = sorted(piece.labels[piece.loss_mask > 0].tolist() for piece in pieces)
    assert answers == sorted(ids(f"answer {n}<|im_end|>") for n in range(5))

    source = source_of_text(str(SAVED / "mixed"), context_length=512)
    one, other = (source.read(0, at, 0, int(n)) for at, n in enumerate(source.lengths(0)))
    assert one.tokens.tolist() == other.tokens.tolist(), "a list of parts is the text in it"
    assert one.labels[one.loss_mask > 0].tolist() == ids("yo<|im_end|>")

    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CorpusError, match=r"empty\.jsonl holds no record"):
        source_of_text(str(tmp_path / "empty.jsonl"))


def test_lines_across_the_borders_of_shards_are_read_once(tmp_path):
    from megatron_hdp.data.streams.files import list_shards
    from megatron_hdp.data.streams.records import read_records

    path = write(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    for size in (1, 7, 64, 200, 1 << 20):
        shards = list_shards(path, size)
        texts = [record["text"] for shard in shards for _, record in read_records(shard)]
        assert texts == documents(), size


def test_chats_are_trained_on_their_answers_only(source_of_text, tmp_path):
    hugging_face = {"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}  # fmt: skip
    source = source_of_text(write(tmp_path / "a.jsonl", [hugging_face]), context_length=96)
    piece = source.read(0, 0, 0, int(source.lengths(0)[0]))
    prompt = ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    answer, rest = ids("yo<|im_end|>"), [*ids("\n"), EOD]
    assert piece.tokens.tolist() == prompt + answer + rest
    # A position's loss is that of the token behind it.
    assert piece.loss_mask.tolist() == [0.0] * (len(prompt) - 1) + [1.0] * len(answer) + [0.0] * 3
    assert piece.labels[:-1].tolist() == piece.tokens[1:].tolist()
    # A shard of the sequence has its part of the same mask.
    cut = len(prompt) + 1
    for start, stop in ((0, cut), (cut, len(piece.tokens))):
        part = source.read(0, 0, start, stop)
        assert part.loss_mask.tolist() == piece.loss_mask[start:stop].tolist()
        assert part.labels.tolist() == piece.labels[start:stop].tolist()


def test_megatrons_merged_conversations_are_sequences_of_their_own(source_of_text, tmp_path):
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c")]
    merged = {"messages": [{"role": role, "content": content} for role, content in turns]}
    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}
    path = write(tmp_path / "a.jsonl", [merged, shared])
    source = source_of_text(path, context_length=256)
    lengths = source.lengths(0)
    masks = [source.read(0, at, 0, int(n)).loss_mask.sum() for at, n in enumerate(lengths)]
    assert sorted(masks) == [0.0, 1.0 + len("<|im_end|>"), 1.0 + len("<|im_end|>")]


def test_cut_loses_no_token_and_no_target(source_of_text, tmp_path):
    texts = ["x" * 200, "short", "y" * 63, "z" * 64]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    with pytest.raises(CorpusError, match=r"--seq-length 64 is shorter than 1 .* cut or drop"):
        source_of_text(path).lengths(0)
    source = source_of_text(path, long_documents="cut", seed=1)
    whole = {ids(text)[0]: [*ids(text), EOD] for text in texts}
    seen = epoch_of(source, sum(map(len, whole.values())))
    assert sorted(map(len, seen)) == sorted([64, 64, 64, 9, 6, 64, 64, 1])
    targets = 0
    for pack in range(6):
        for position, length in enumerate(source.lengths(pack)):
            piece = source.read(pack, position, 0, int(length))
            targets += int(piece.loss_mask.sum())
            inside = piece.labels[piece.loss_mask > 0]
            assert inside[:-1].tolist() == piece.tokens[1 : len(inside)].tolist()
    dropped = source_of_text(path, long_documents="drop")
    assert sorted(map(len, epoch_of(dropped, 6 + 64))) == [6, 64]


def test_splits_share_the_documents_out(source_of_text, tmp_path):
    texts = [f"{n:04d}" for n in range(1000)]
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    shares = (0.0, 0.8), (0.8, 0.9), (0.9, 1.0)
    parts = []
    for share in shares:
        source = source_of_text(path, share=share)
        total = sum(
            5 * len(source._pieces(shard).length) for shard in range(len(source._store.shards))
        )
        parts.append({tuple(sequence) for sequence in epoch_of(source, total)})
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1000
    assert 760 < len(parts[0]) < 840


def test_state_goes_on_bitwise_with_and_without_the_cache(source_of_text, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    whole, again = source_of_text(path), source_of_text(path, cache="other")
    wanted = [whole.lengths(pack).tolist() for pack in range(200)]
    state = whole.state(90)
    assert len(str(state)) < 200
    again.restore(state)
    assert [again.lengths(pack).tolist() for pack in range(90, 200)] == wanted[90:]
    for position, length in enumerate(wanted[150]):
        one, other = (source.read(150, position, 0, length) for source in (whole, again))
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(CorpusError, match="belongs to other files"):
        source_of_text(path, seed=6).restore(state)


def test_one_bad_line_in_ten_thousand(source_of_text, tmp_path, caplog):
    records: list = [{"text": str(n)} for n in range(10_000)]
    records[7_000] = '{"text": "no end'
    path = write(tmp_path / "a.jsonl.gz", records)
    with pytest.raises(CorpusError, match=r"line 7001: no JSON.*--hdp-malformed-records skip"):
        source_of_text(path).lengths(0)
    source = source_of_text(path, skip=True)
    total = sum(len(str(n)) + 1 for n in range(10_000) if n != 7_000)
    assert len(epoch_of(source, total)) == 9_999
    assert "1 malformed records left out, the first at line 7001" in caplog.text


@pytest.mark.parametrize("record", ["[1]", {"body": "x"}, {"text": 3}, {"messages": []},
                                    {"messages": [{"role": "user"}]}], ids=str)  # fmt: skip
def test_what_is_no_record(source_of_text, tmp_path, record):
    path = write(tmp_path / "a.jsonl", [{"text": "fine"}, record])
    with pytest.raises(CorpusError, match="mend the record"):
        source_of_text(path).lengths(0)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_truncated_files_end_in_one_sentence(source_of_text, tmp_path, name):
    rng = np.random.RandomState(0)
    texts = ["".join(map(chr, rng.randint(97, 123, 30))) for _ in range(3000)]
    path = write(tmp_path / name, [{"text": text} for text in texts])
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(CorpusError, match="truncated"):
        source_of_text(path, skip=True).lengths(2000)  # a whole record is not what is missing


def test_who_waits_for_a_shard_says_for_whom(source_of_text, tmp_path):
    from megatron_hdp.data.streams import store as stores

    path = write(tmp_path / "a.jsonl", [{"text": "x"}])
    store = source_of_text(path)._store
    store.timeout_s = 0.2
    with stores._lock(store._base(0)) as held:
        assert held
        with pytest.raises(TimeoutError, match=rf"0 s for process {os.getpid()} of .* to tokenise"):
            store.open(0)
    assert store.open(0).lengths.tolist() == [2]  # what a killed process leaves is no lock


def test_a_process_tokenises_ahead(source_of_text, tmp_path):
    import time

    from megatron_hdp.data.streams.ahead import TokeniseAhead

    path = write(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    store = source_of_text(path)._store
    ahead = TokeniseAhead(store)
    ahead([2, 1])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list((tmp_path / "cache").glob("*.json"))) < 2:
        time.sleep(0.1)
    ahead.close()
    assert not store.try_ahead(1)
    assert not store.try_ahead(2)
    assert store.try_ahead(0)


def test_blends_keep_their_weights_in_tokens(source_of_text, tmp_path):
    from megatron_hdp.data.blends import TokenBlend

    # Packs of long documents are little more than half full.
    long = write(tmp_path / "long.jsonl", [{"text": "l" * 35} for _ in range(50)])
    short = write(tmp_path / "short.jsonl", [{"text": "s" * 7} for _ in range(50)])

    def blend():
        return TokenBlend([source_of_text(long), source_of_text(short)], [0.7, 0.3], 10_000)

    mixed = blend()
    lengths = [mixed.lengths(pack) for pack in range(1000)]
    tokens = [sum(int(own.sum()) for own in lengths if own[0] == kind) for kind in (36, 8)]
    assert abs(tokens[0] / sum(tokens) - 0.7) < 0.001
    state, again = mixed.state(600), blend()
    assert len(str(state)) < 600
    again.restore(state)
    for pack in range(600, 1000):
        assert again.lengths(pack).tolist() == lengths[pack].tolist()


@pytest.mark.parametrize("name, sentence", [
    ("gone.jsonl", "no such file"),
    ("empty", "holds no .jsonl"),
    ("splits", "give one of them, as .*/train"),
])  # fmt: skip
def test_paths_that_hold_no_records(tmp_path, name, sentence):
    from megatron_hdp.data.corpus import check_corpora

    for folder in ("empty", "splits"):
        (tmp_path / folder).mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(CorpusError, match=sentence):
        check_corpora([str(tmp_path / name)])
