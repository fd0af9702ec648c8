"""Texts and streams of ids, embedded, from files or fetched; nothing leaves the machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from object_stores import web_server
from tokenizers import Tokenizer, models, pre_tokenizers

from trajstore.errors import ConfigError, CorpusError, InvalidArgument
from trajstore.trainers import fetch
from trajstore.trainers.downloads import (
    _GPT2_SHA256,
    CACHE_VARIABLE,
    _vocabulary_sha256,
    cached,
    clean_book,
)
from trajstore.trainers.presets import preset
from trajstore.trainers.recording.options import read_tokens
from trajstore.trainers.texts import embedded_text, id_stream, load_corpus

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fetched texts are kept; there is none yet."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def words(path: Path, vocabulary: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def bird(**model: Any) -> Any:
    return preset("wordybird-1").with_values(
        ["model.context=2", *(f"model.{name}={value}" for name, value in model.items())]
    )


def test_the_embedded_text_and_ids_are_as_the_notebooks_saw_them() -> None:
    """Always the same bytes: a stand-in that drifts would change every recorded run."""
    assert hashlib.sha256(embedded_text()).hexdigest().startswith("3472d1a5f05f323c")
    corpus = load_corpus(preset("gatsby"))
    assert (corpus.counts() == 0).sum() == 51
    assert corpus.tokenizer == {"name": "ascii"}
    ids = id_stream(50_257, 30_590)
    assert hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest().startswith("a8f37617c0af0c91")
    assert (np.bincount(id_stream(10_000, 6_301), minlength=10_000) == 0).sum() == 3_699
    assert id_stream(5, 5).size == 475_160


def test_without_text_or_tokenizer_the_stream_stands_in() -> None:
    corpus = load_corpus(preset("wordybird-1"))
    assert (corpus.counts() == 0).sum() == 19_667
    assert corpus.token_text is None
    assert corpus.provenance()["corpus"]["bytes"] == 4 * 475_160
    with pytest.raises(ConfigError, match=r"data\.live_tokens = 30590, but the model has only 50"):
        load_corpus(bird(vocab_size=50))


def test_a_tokenizer_and_a_text_from_disk(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "tokenizer.json", ["?", "the", "cat", "dog"])
    text = tmp_path / "text.txt"
    text.write_text("the cat the cat the rat")
    corpus = load_corpus(bird(vocab_size=4), corpus=text, tokenizer=tokenizer)
    assert corpus.ids.tolist() == [1, 2, 1, 2, 1, 0]
    assert corpus.token_text == ("?", "the", "cat", "dog")
    assert corpus.counts().tolist() == [1, 3, 2, 0]
    assert len(corpus.tokenizer["sha256"]) == 64
    with pytest.raises(ConfigError, match=r"vocab_size = 5, but the tokenizer .* has 4 tokens"):
        load_corpus(bird(vocab_size=5), corpus=text, tokenizer=tokenizer)
    without = bird(vocab_size=4).with_values(["data.tokenizer=none"])
    assert (load_corpus(without, corpus=text, tokenizer=tokenizer).ids == corpus.ids).all()
    with pytest.raises(ConfigError, match="'none': a text needs a tokenizer; give tokenizer="):
        load_corpus(without, corpus=text)
    with pytest.raises(ConfigError, match="a text needs its tokenizer"):
        load_corpus(bird(vocab_size=4), corpus=text)


def test_a_fetched_corpus_is_loaded(cache: Path) -> None:
    (cache / "gpt2").mkdir(parents=True)
    words(cache / "gpt2" / "tokenizer.json", ["?", "the", "cat"])
    (cache / "gpt2" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (cache / "fineweb.txt").write_text("cat the cat the")
    corpus = load_corpus(bird(vocab_size=3))
    assert corpus.name == "fineweb.txt"
    assert corpus.ids.tolist() == [2, 1, 2, 1]
    (cache / "gatsby.txt").write_text("x" * 200)
    assert load_corpus(preset("gatsby")).name == "gatsby.txt"


def test_bad_texts_and_tokenizers_are_reported(tmp_path: Path) -> None:
    text, broken = tmp_path / "text.txt", tmp_path / "broken.json"
    tokenizer = words(tmp_path / "tokenizer.json", ["?", "the"])
    broken.write_text("{}")
    of_text: list[tuple[bytes | None, type[Exception], str]] = [
        (None, InvalidArgument, "cannot read the corpus"),
        (b"", CorpusError, "is empty"),
        (b"one\ncaf\xc3\xa9", CorpusError, r"2 bytes that are not ASCII.*line 2"),
        (b"short", CorpusError, "has 5 tokens, but one training example needs 129"),
    ]
    for content, kind, message in of_text:
        if content is not None:
            text.write_bytes(content)
        with pytest.raises(kind, match=message):
            load_corpus(preset("gatsby"), corpus=text)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(CorpusError, match="not UTF-8"):
        load_corpus(bird(vocab_size=2), corpus=text, tokenizer=tokenizer)
    for path, kind, message in (
        (tmp_path / "nowhere", InvalidArgument, "there is no tokenizer at"),
        (broken, CorpusError, "cannot load a tokenizer"),
    ):
        with pytest.raises(kind, match=message):
            load_corpus(preset("gatsby"), tokenizer=path)


def test_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# some\n3 1  # two\n12\n")
    assert read_tokens(file).tolist() == [3, 1, 12]
    with pytest.raises(InvalidArgument, match="expected all, dead, live or a text file"):
        read_tokens(tmp_path / "nowhere")
    for content, message in (("1\n-2", r"line 2: got '-2'"), ("\n", "has no token id")):
        file.write_text(content)
        with pytest.raises(InvalidArgument, match=message):
            read_tokens(file)


# Fetching, from a server on loopback and from local files ---------------------------------------

SHARED = next(
    (p / "shared/data" for p in Path(__file__).parents if (p / "shared/data").exists()),
    Path("shared/data"),
)

BOOK = (
    "\ufeffLicence and thanks.\r\n*** START OF THE PROJECT GUTENBERG EBOOK A BOOK ***\r\n\r\n"
    "In my “younger”\r\nyears—vulnerable ones—my\r\nfather gave me\r\n\r\n\r\n"
    "  some advice: café.\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK ***\r\nMore licence."
)
CLEAN = 'In my "younger" years--vulnerable ones--my father gave me\nsome advice: cafe.\n'


def test_a_book_over_http_stays_when_another_download_fails(tmp_path: Path, cache: Path) -> None:
    book = tmp_path / "site" / "book.txt"
    book.parent.mkdir()
    book.write_bytes(BOOK.encode())
    assert fetch("gatsby", source=str(book)).size == len(CLEAN)
    with web_server(book.parent) as (address, _):
        fetched = fetch("gatsby", source=f"{address}/book.txt")
        assert fetched.path == cached("gatsby") == cache / "gatsby.txt"
        assert fetched.path.read_text() == CLEAN
        assert fetched.sha256 == hashlib.sha256(CLEAN.encode()).hexdigest()
        source = json.loads((cache / "gatsby.json").read_text())["source"]
        assert source == f"{address}/book.txt"
        with pytest.raises(CorpusError, match="cannot download"):
            fetch("gatsby", source=f"{address}/nothing.txt")
        with pytest.raises(CorpusError, match="expected 00; nothing was kept"):
            fetch("gatsby", source=source, sha256="00")
        book.write_text("<html>Not found, but politely</html>")
        with pytest.raises(CorpusError, match="not a plain text of Project Gutenberg"):
            fetch("gatsby", source=source)
    assert sorted(p.name for p in cache.iterdir()) == ["gatsby.json", "gatsby.txt"]
    assert (cache / "gatsby.txt").read_text() == CLEAN
    with pytest.raises(CorpusError, match="characters without an ASCII form here: ☃"):
        clean_book(BOOK.replace("advice", "☃"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_two_mebibytes_of_a_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    document = "Ünïcode words, and more of them. " * 40
    with (folder / "train.jsonl").open("w") as file:
        for number in range(2_000):
            file.write(json.dumps({"text": f"{number}: {document}"}) + "\n")
    fetched = fetch("fineweb", source=str(folder))
    data = fetched.path.read_bytes()
    assert 2_097_149 < len(data) <= 2_097_152
    assert data.decode().startswith(f"0: {document}\n1: ")


@pytest.mark.nightly
@pytest.mark.skipif(not SHARED.exists(), reason="the real tokenizer is not at hand")
def test_a_tokenizer_from_disk_and_its_hash() -> None:
    fetched = fetch("gpt2", source=str(SHARED / "gpt2"))
    assert fetched.size == 50_257
    assert fetched.sha256 == _GPT2_SHA256
    state = json.loads((SHARED / "gpt2" / "tokenizer.json").read_text())
    state["model"]["merges"][7], state["model"]["merges"][8] = state["model"]["merges"][8:6:-1]
    assert _vocabulary_sha256(state) != _GPT2_SHA256
    again = fetch("gpt2", source=str(fetched.path), sha256=_GPT2_SHA256)
    assert again.sha256 == fetched.sha256


def test_what_cannot_be_fetched() -> None:
    with pytest.raises(InvalidArgument, match="choose from gatsby, fineweb, gpt2"):
        fetch("llama")
    for name, message in (
        ("gpt2", "cannot get the tokenizer"),
        ("fineweb", "cannot read the data"),
    ):
        with pytest.raises(CorpusError, match=message):
            fetch(name, source="/nowhere/at/all")


@pytest.mark.parametrize("name", ["gatsby", "gpt2", "fineweb"])
def test_a_server_that_is_not_there_is_reported_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    match = r"cannot reach http://127\.0\.0\.1:9 .* local copy as source=…"
    with pytest.raises(CorpusError, match=match):
        fetch(name, source="http://127.0.0.1:9/book.txt" if name == "gatsby" else None)
    assert not cache.exists()
