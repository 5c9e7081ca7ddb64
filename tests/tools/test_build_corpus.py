# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""From files to a corpus: every token, deterministic, and one sentence for what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cpu.launch import run_ranks

TEXTS = {
    "a.py": "def f(x):\n    return x + 1\n" * 3,
    "b/long.py": "value = [i ** 2 for i in range(10)]\n" * 200,
    "b/quotes.py": "END = '<|endofdocument|>'  # is no end\n",
    "c.py": "print('Grüße, 世界')\n",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "code"
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "blank.py").write_text(" \n")
    (root / "binary.py").write_bytes(b"\xff\xfe\x00")
    (root / ".hidden.py").write_text("secret = 1\n")
    (root / "notes.txt").write_text("not code\n")
    return root


@pytest.fixture
def build(megatron_on_cpu, tmp_path):
    """The tool's (exit code, stdout, stderr), in a fork: tokenizers starts threads."""

    def run(*argv: str) -> tuple[int, str, str]:
        from tools.build_corpus import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["--output-prefix", str(tmp_path / "out" / "corpus"), *argv])
        return code, out.getvalue(), err.getvalue()

    return lambda *argv: run_ranks(run, 1, *map(str, argv))[0]


def _documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert np.array_equal(dataset.document_indices, np.arange(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_each_text_comes_back(build, folder, tmp_path):
    code, out, err = build("--input", folder, "--pattern", "*.py", "--bpe-vocab-size", 300)
    assert code == 0, err
    from tokenizers import Tokenizer

    prefix = tmp_path / "out" / "corpus"
    tokenizer = Tokenizer.from_file(f"{prefix}.tokenizer.json")
    eod = tokenizer.token_to_id("<|endofdocument|>")
    documents = _documents(prefix)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == list(TEXTS.values())
    assert all(ids[-1] == eod and eod not in ids[:-1] for ids in documents)
    assert "4 documents" in out
    assert "2 blank or not UTF-8" in out
    assert f"--tokenizer-type NullTokenizer --vocab-size {eod + 1}" in out
    assert tokenizer.get_vocab_size() == eod + 1 == 300


def test_training_agrees_on_the_end_of_document(build, folder, tmp_path):
    """What the tool prints gives the training side the same eod and enough vocabulary."""
    _, out, _ = build("--input", folder)
    arguments = out.split("train with:")[1].split()
    from megatron_hdp.data.building.encoders import megatron_tokenizer

    encoder = megatron_tokenizer(arguments[2:])
    documents = _documents(Path(arguments[1]))
    assert {ids[-1] for ids in documents} == {encoder.eod}
    assert max(map(max, documents)) < encoder.vocab_size


def test_twice_is_the_same_bytes(build, folder, tmp_path):
    made = []
    for _ in range(2):
        assert build("--input", folder, "--bpe-vocab-size", 400)[0] == 0
        files = sorted((tmp_path / "out").iterdir())
        made.append([(file.name, file.read_bytes()) for file in files])
    assert made[0] == made[1]
    names = [name for name, _ in made[0]]
    assert names == ["corpus.bin", "corpus.idx", "corpus.tokenizer.json"]


def test_long_documents_are_cut_and_counted(build, folder, tmp_path):
    options = ["--input", folder, "--pattern", "*.py", "--bpe-vocab-size", 300]
    _, out, _ = build(*options, "--max-length", 50)
    lengths = [len(ids) for ids in _documents(tmp_path / "out" / "corpus")]
    assert max(lengths) == 50
    assert "1 cut and 0 dropped" in out
    _, out, _ = build(*options, "--max-length", 50, "--too-long", "drop")
    assert len(_documents(tmp_path / "out" / "corpus")) == 3
    assert "0 cut and 1 dropped" in out


def test_sample_is_chosen_by_seed_in_order(build, folder, tmp_path):
    def sample(seed: int) -> list[int]:
        build("--input", folder, "--pattern", "*.py", "--sample", 2, "--seed", seed,
              "--tokenizer-type", "NullTokenizer", "--vocab-size", 9)  # fmt: skip
        return [len(ids) for ids in _documents(tmp_path / "out" / "corpus")]

    for name in list(TEXTS):
        (folder / name).write_text(" ".join("1" * (1 + list(TEXTS).index(name))))
    seen = {seed: sample(seed) for seed in range(4)}
    assert seen[0] == sample(0)
    assert all(lengths == sorted(lengths) and len(lengths) == 2 for lengths in seen.values())
    assert len(set(map(tuple, seen.values()))) > 1


def test_jsonl_and_a_megatron_tokenizer(build, tmp_path):
    path = tmp_path / "numbers.jsonl"
    lines = [{"ids": "5 6 7"}, {"ids": "1"}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100_000]
    code, out, err = build("--input", path, "--json-key", "ids", *tokenizer)
    assert code == 0, err
    assert _documents(tmp_path / "out" / "corpus") == [[5, 6, 7, 99_999], [1, 99_999]]
    assert "--tokenizer-type NullTokenizer --vocab-size 100000" in out


def test_picture(build, folder, tmp_path):
    code, _, err = build("--input", folder, "--picture", tmp_path / "lengths.png")
    assert code == 0, err
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_histogram_counts_everything_once():
    from megatron_hdp.data.building.lengths import histogram

    lengths = np.array([1, 2, 3, 4, 5, 8, 9, 1024, 1025])
    bounds, documents, tokens = histogram(lengths)
    assert list(bounds) == [2**i for i in range(12)]
    assert list(documents) == [1, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1]
    assert tokens.sum() == lengths.sum()


def _bad_line(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + text + "\n")
    return ["--input", str(path)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "/nowhere"], "--input /nowhere: give a folder or an existing .jsonl file"),
        (["FOLDER", "--pattern", "*.c"], "no text found (--pattern '*.c')"),
        (["FOLDER", "--max-length", "0"], "--max-length 0: give at least 1"),
        (["FOLDER", "--bpe-vocab-size", "100"], "--bpe-vocab-size 100: give at least 257"),
        (["FOLDER", "--max-lenght", "5"], "--max-lenght 5: no argument of this tool"),
        (["FOLDER", "--tokenizer-type", "NoSuch"], "invalid choice: 'NoSuch'"),
        (["FOLDER", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere"],
         "Megatron cannot build this tokenizer"),
        (["FOLDER", "--tokenizer-type", "NullTokenizer", "--bogus"], "--bogus: neither"),
        (["FOLDER", "--max-length", "2", "--too-long", "drop"], "--max-length 2 drops all"),
        (["LINE", "{"], "line 2 is no JSON object with a text under 'text'"),
        (["LINE", '{"content": "x"}'], "name the field with --json-key"),
        (["LINE", '{"text": null}'], "line 2 is no JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_and_leaves_nothing(
    build, folder, tmp_path, arguments, words
):
    if arguments[0] == "FOLDER":
        arguments = ["--input", str(folder), *arguments[1:]]
    elif arguments[0] == "LINE":
        arguments = _bad_line(tmp_path, arguments[1])
    code, out, err = build(*arguments)
    assert code == 1
    assert words in err
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.glob("out/*.bin*")) + list(tmp_path.glob("out/*.idx*"))


def test_failure_leaves_the_corpus_that_was_there(build, folder, tmp_path):
    assert build("--input", folder)[0] == 0
    before = _documents(tmp_path / "out" / "corpus")
    assert build("--input", folder, "--max-length", 1, "--too-long", "drop")[0] == 1
    assert _documents(tmp_path / "out" / "corpus") == before
