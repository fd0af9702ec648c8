"""Texts and streams of ids, embedded or from files, as token ids."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from tokenizers import Tokenizer, models, pre_tokenizers

from trajstore.errors import ConfigError, CorpusError, InvalidArgument
from trajstore.trainers.downloads import CACHE_VARIABLE
from trajstore.trainers.presets import preset
from trajstore.trainers.recording.options import read_tokens
from trajstore.trainers.texts import embedded_text, id_stream, load_corpus

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache


def words(path: Path, vocabulary: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def bird(**model: Any) -> Any:
    return preset("wordybird-1").with_values(
        ["model.context=2", *(f"model.{name}={value}" for name, value in model.items())]
    )


def test_the_embedded_text_is_as_the_notebooks_saw_it() -> None:
    text = embedded_text()
    assert (len(text), len(set(text))) == (265_905, 77)
    # Always the same bytes: others would change every recorded run.
    assert hashlib.sha256(text).hexdigest().startswith("3472d1a5f05f323c")
    corpus = load_corpus(preset("gatsby"))
    assert (corpus.counts() == 0).sum() == 51
    assert corpus.tokenizer == {"name": "ascii"}


def test_the_embedded_ids_are_as_many_and_as_skewed() -> None:
    ids = id_stream(50_257, 30_590)
    counts = np.bincount(ids, minlength=50_257)
    assert (ids.size, np.count_nonzero(counts)) == (475_160, 30_590)
    ranked = np.sort(counts)[::-1]
    assert 0.02 < ranked[0] / ids.size < 0.06
    ratios = ranked[[10, 100, 1000]] * (np.array([10, 100, 1000]) + 3.7)
    assert ratios.max() / ratios.min() < 1.3  # Zipf: frequency times rank is level
    # The same everywhere and always: a stand-in that drifts would change every recorded run.
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


def test_a_fetched_corpus_is_loaded(tmp_path: Path, empty_cache: Path) -> None:
    (empty_cache / "gpt2").mkdir()
    words(empty_cache / "gpt2" / "tokenizer.json", ["?", "the", "cat"])
    (empty_cache / "gpt2" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (empty_cache / "fineweb.txt").write_text("cat the cat the")
    corpus = load_corpus(bird(vocab_size=3))
    assert corpus.name == "fineweb.txt"
    assert corpus.ids.tolist() == [2, 1, 2, 1]
    (empty_cache / "gatsby.txt").write_text("x" * 200)
    assert load_corpus(preset("gatsby")).name == "gatsby.txt"


def test_bad_texts_are_reported(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    gatsby = preset("gatsby")
    with pytest.raises(InvalidArgument, match="cannot read the corpus"):
        load_corpus(gatsby, corpus=text)
    text.write_bytes(b"")
    with pytest.raises(CorpusError, match="is empty"):
        load_corpus(gatsby, corpus=text)
    text.write_bytes(b"one\ncaf\xc3\xa9")
    with pytest.raises(CorpusError, match=r"2 bytes that are not ASCII.*line 2"):
        load_corpus(gatsby, corpus=text)
    text.write_text("short")
    with pytest.raises(CorpusError, match="has 5 tokens, but one training example needs 129"):
        load_corpus(gatsby, corpus=text)
    text.write_bytes(b"\xff\xfe")
    tokenizer = words(tmp_path / "tokenizer.json", ["?", "the"])
    with pytest.raises(CorpusError, match="not UTF-8"):
        load_corpus(bird(vocab_size=2), corpus=text, tokenizer=tokenizer)
    with pytest.raises(InvalidArgument, match="there is no tokenizer at"):
        load_corpus(gatsby, tokenizer=tmp_path / "nowhere")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(CorpusError, match="cannot load a tokenizer"):
        load_corpus(gatsby, tokenizer=broken)


def test_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# some\n3 1  # two\n12\n")
    assert read_tokens(file).tolist() == [3, 1, 12]
    file.write_text("1\n-2")
    with pytest.raises(InvalidArgument, match=r"line 2: got '-2'"):
        read_tokens(file)
    file.write_text("\n")
    with pytest.raises(InvalidArgument, match="has no token id"):
        read_tokens(file)
    with pytest.raises(InvalidArgument, match="expected all, dead, live or a text file"):
        read_tokens(tmp_path / "nowhere")
