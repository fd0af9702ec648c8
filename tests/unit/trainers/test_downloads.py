"""Fetching, from a server on loopback and from local files; nothing leaves the machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pooch")
from object_stores import web_server

from trajstore.errors import CorpusError, InvalidArgument
from trajstore.trainers import fetch
from trajstore.trainers.downloads import (
    _GPT2_SHA256,
    CACHE_VARIABLE,
    _vocabulary_sha256,
    cached,
    clean_book,
)

pytestmark = pytest.mark.torch

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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()
    with web_server(folder) as (address, _):
        yield folder, address


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_book_over_http(site: tuple[Path, str], cache: Path) -> None:
    folder, address = site
    (folder / "book.txt").write_bytes(BOOK.encode())
    fetched = fetch("gatsby", source=f"{address}/book.txt")
    assert fetched.path == cached("gatsby") == cache / "gatsby.txt"
    assert fetched.path.read_text() == CLEAN
    assert fetched.sha256 == hashlib.sha256(CLEAN.encode()).hexdigest()
    assert json.loads((cache / "gatsby.json").read_text())["source"] == f"{address}/book.txt"
    assert sorted(p.name for p in cache.iterdir()) == ["gatsby.json", "gatsby.txt"]


def test_a_failed_download_keeps_what_was_there(site: tuple[Path, str], cache: Path) -> None:
    folder, address = site
    (folder / "book.txt").write_bytes(BOOK.encode())
    fetch("gatsby", source=f"{address}/book.txt")
    with pytest.raises(CorpusError, match="cannot download"):
        fetch("gatsby", source=f"{address}/nothing.txt")
    with pytest.raises(CorpusError, match="expected 00; nothing was kept"):
        fetch("gatsby", source=f"{address}/book.txt", sha256="00")
    (folder / "book.txt").write_text("<html>Not found, but politely</html>")
    with pytest.raises(CorpusError, match="not a plain text of Project Gutenberg"):
        fetch("gatsby", source=f"{address}/book.txt")
    assert (cache / "gatsby.txt").read_text() == CLEAN


def test_a_book_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(BOOK.encode())
    assert fetch("gatsby", source=str(file)).size == len(CLEAN)
    with pytest.raises(CorpusError, match="characters without an ASCII form here: ☃"):
        clean_book(BOOK.replace("advice", "☃"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_two_mebibytes_of_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
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
    with pytest.raises(CorpusError, match="cannot read the data set"):
        fetch("fineweb", source=str(tmp_path / "nowhere"))


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


def test_names_that_cannot_be_fetched() -> None:
    with pytest.raises(InvalidArgument, match="choose from gatsby, fineweb, gpt2"):
        fetch("llama")
    with pytest.raises(CorpusError, match="cannot get the tokenizer"):
        fetch("gpt2", source="/nowhere/at/all")


@pytest.mark.parametrize("name", ["gatsby", "gpt2", "fineweb"])
def test_a_server_that_is_not_there_is_reported_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    match = r"cannot reach http://127\.0\.0\.1:9 .* local copy as source=…"
    with pytest.raises(CorpusError, match=match):
        fetch(name, source="http://127.0.0.1:9/book.txt" if name == "gatsby" else None)
    assert not cache.exists()
