"""Downloads of the notebooks' texts and tokenizer into the user's cache.

No other module of the package uses the network. A download is checked before it is stored: the book
by its beginning, end and characters; the tokenizer by the hash of its vocabulary and merges; any
download by its sha256 if one is given. A JSON file stores its source, hash and size.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trajstore.errors import CorpusError, InvalidArgument, did_you_mean, needs_extra
from trajstore.store.storage.atomic import make_folder, put
from trajstore.store.storage.remote_path import hub_endpoint
from trajstore.store.writing.create import move_into_place

CACHE_VARIABLE = "TRAJSTORE_CACHE"
"""Environment variable with the path of another cache folder."""

_CACHED = {"gatsby": "gatsby.txt", "fineweb": "fineweb.txt", "gpt2": "gpt2"}
"""Name in the cache of each download."""

_GATSBY = "https://www.gutenberg.org/cache/epub/64317/pg64317.txt"
_FINEWEB = "HuggingFaceFW/fineweb"
_FINEWEB_BYTES = 2 << 20
_GPT2 = "openai-community/gpt2"
_GPT2_SHA256 = "66c45d6416f9a0db46be14a0ce962b7e0f281b953f5e64d35e842175b4100ff4"
"""Hash of GPT-2's vocabulary and merges, from `_vocabulary_sha256`."""

_TIMEOUT = 8
"""Seconds until a server must answer."""

_START, _END = "*** START OF", "*** END OF"

_ASCII = {
    "“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\u00a0": " ",
    "é": "e", "è": "e", "ê": "e", "ç": "c", "à": "a", "ô": "o", "ï": "i", "ü": "u", "œ": "oe",
    "\ufeff": "",
}  # fmt: skip


def _cache_folder() -> Path:
    """Return the user's cache; it need not exist."""
    variable = os.environ.get(CACHE_VARIABLE)
    if variable:
        return Path(variable)
    return Path(_hub("platformdirs").user_cache_dir("trajstore", appauthor=False))


def cached(name: str) -> Path | None:
    """Return the cached path of ``gatsby``, ``fineweb`` or ``gpt2``, or None."""
    path = _cache_folder() / _CACHED[name]
    return path if path.exists() else None


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A download.

    Attributes
    ----------
    path : Path
        A text, or the folder of a tokenizer.
    source : str
    sha256 : str
        Hash of the text on disk, or of the tokenizer's vocabulary and merges.
    size : int
        Bytes of the text; tokens of the vocabulary.
    """

    path: Path
    source: str
    sha256: str
    size: int


def fetch(name: str, *, source: str | None = None, sha256: str | None = None) -> Fetched:
    r"""Download a text or a tokenizer into the cache, where `trainers.record` finds it.

    Parameters
    ----------
    name : {'gatsby', 'fineweb', 'gpt2'}
        The Great Gatsby from Project Gutenberg, unwrapped and in plain ASCII; the first 2 MiB of
        FineWeb's sample; GPT-2's tokenizer.
    source : str, optional
        Another source: an address or a file for gatsby, a data set's name or folder for fineweb,
        a model's name or folder for gpt2.
    sha256 : str, optional
        Expected hash of the result. gpt2 has a default.

    Raises
    ------
    InvalidArgument
        If the name is unknown.
    CorpusError
        If the download fails or its check fails. The cache then stays unchanged.
    MissingExtra
        If the extra ``hub`` is not installed.

    Examples
    --------
    >>> book = "*** START OF A BOOK ***\nA line.\n*** END OF A BOOK ***"
    >>> _ = Path("book.txt").write_text(book)
    >>> fetched = fetch("gatsby", source="book.txt")  # without a source, The Great Gatsby
    >>> fetched.path.read_text()
    'A line.\n'
    """
    if name not in FETCHED:
        raise InvalidArgument(
            f"cannot fetch {name!r}{did_you_mean(name, FETCHED)}; choose from {', '.join(FETCHED)}"
        )
    folder = _cache_folder()
    address = source or (_GATSBY if name == "gatsby" else hub_endpoint())
    if address.startswith(("http://", "https://")) and not _needs_no_request(name, source):
        _check_reachable(address)
    make_folder(folder)
    target = folder / _CACHED[name]
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        fetched = FETCHED[name](Path(scratch) / target.name, source)
        wanted = sha256 or (_GPT2_SHA256 if name == "gpt2" and source is None else None)
        if wanted is not None and wanted.lower() != fetched.sha256:
            raise CorpusError(
                f"{name} from {fetched.source} has sha256 {fetched.sha256}, expected {wanted}; "
                "nothing was kept"
            )
        move_into_place(fetched.path, target, old=Path(scratch) / "old", overwrite=True)
    metadata = {"source": fetched.source, "sha256": fetched.sha256, "size": fetched.size}
    put(folder / f"{name}.json", [json.dumps(metadata, indent=1).encode()])
    return replace(fetched, path=target)


def _needs_no_request(name: str, source: str | None) -> bool:
    """Return True if no request is needed or allowed: it is in the hub's cache, or offline."""
    if name == "gatsby":
        _hub("pooch")  # before the request
        return False
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    load = _hub("huggingface_hub").try_to_load_from_cache
    return name == "gpt2" and source is None and isinstance(load(_GPT2, "tokenizer.json"), str)


def _check_reachable(address: str) -> None:
    """Raise an error if a server does not answer; the libraries would retry for half a minute."""
    server = "/".join(address.split("/")[:3])
    request = urllib.request.Request(server, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT).close()
    except urllib.error.HTTPError:
        return
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise CorpusError(
            f"cannot reach {server} ({reason}); fetch on a machine with a network, or give a "
            "local copy as source=…"
        ) from error


def _fetch_gatsby(path: Path, source: str | None) -> Fetched:
    address = source or _GATSBY
    if "://" in address:
        pooch = _hub("pooch")
        pooch.get_logger().setLevel("WARNING")
        try:
            raw = pooch.retrieve(address, known_hash=None, path=path.parent, fname="raw.txt")
        except Exception as error:  # any error of the connection
            raise CorpusError(f"cannot download {address}: {error}") from error
    else:
        raw = address
    try:
        book = Path(raw).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {address}: {error}") from error
    return _write(path, clean_book(book, address).encode("ascii"), address)


def clean_book(book: str, name: str = "the book") -> str:
    r"""Return the ASCII text of a Project Gutenberg book, one paragraph per line.

    The license before and after the book is dropped. Accents and typographic marks are
    transliterated. The lines of a paragraph are joined with spaces.

    Raises
    ------
    CorpusError
        If the marks of its beginning and end are missing, or a character has no ASCII form here.

    Examples
    --------
    >>> clean_book("*** START OF X ***\nA “b”\nc.\n\nD.\n*** END OF X ***")
    'A "b" c.\nD.\n'
    """
    start, end = book.find(_START), book.find(_END)
    if start < 0 or end < start:
        raise CorpusError(
            f"{name} is not a plain text of Project Gutenberg: it has no lines that begin with "
            f"{_START!r} and {_END!r}; give the file pg….txt of the book"
        )
    body = book[book.index("\n", start) + 1 : end].replace("\r\n", "\n")
    for mark, plain in _ASCII.items():
        body = body.replace(mark, plain)
    if not body.isascii():
        foreign = sorted({character for character in body if not character.isascii()})
        raise CorpusError(
            f"{name} has characters without an ASCII form here: {' '.join(foreign[:10])}; replace "
            "them"
        )
    paragraphs = (" ".join(part.split()) for part in body.split("\n\n"))
    return "".join(f"{paragraph}\n" for paragraph in paragraphs if paragraph)


def _fetch_fineweb(path: Path, source: str | None) -> Fetched:
    datasets = _hub("datasets")
    place = source or _FINEWEB
    options: dict[str, Any] = {} if source else {"name": "sample-10BT"}
    try:
        stream = datasets.load_dataset(place, split="train", streaming=True, **options)
        data = _head(str(row["text"]) for row in stream)
    except Exception as error:  # any error of the connection
        raise CorpusError(f"cannot read the data set {place}: {error}") from error
    return _write(path, data, place)


def _head(texts: Iterator[str]) -> bytes:
    """Return the first 2 MiB of documents, separated by line breaks, cut between characters."""
    parts: list[bytes] = []
    size = 0
    for text in texts:
        parts.append(text.encode() + b"\n")
        size += len(parts[-1])
        if size >= _FINEWEB_BYTES:
            break
    return b"".join(parts)[:_FINEWEB_BYTES].decode(errors="ignore").encode()


def _fetch_gpt2(path: Path, source: str | None) -> Fetched:
    transformers = _hub("transformers")
    place = source or _GPT2
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            place, local_files_only=os.path.isdir(place)
        )
        tokenizer.save_pretrained(path)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # any error of the connection
        raise CorpusError(f"cannot get the tokenizer {place}: {error}") from error
    return Fetched(path=path, source=place, sha256=_vocabulary_sha256(state), size=len(tokenizer))


def _vocabulary_sha256(state: dict[str, Any]) -> str:
    """Return the hash of vocabulary and merges, independent of the files' layout."""
    model = state["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    text = json.dumps([sorted(model["vocab"].items()), merges], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, data: bytes, source: str) -> Fetched:
    if not data:
        raise CorpusError(f"{source} has no text; give another source")
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return Fetched(path=path, source=source, sha256=sha256, size=len(data))


def _hub(module: str) -> Any:
    with needs_extra("fetch", "hub"):
        return __import__(module)


FETCHED: dict[str, Callable[[Path, str | None], Fetched]] = {
    "gatsby": _fetch_gatsby,
    "fineweb": _fetch_fineweb,
    "gpt2": _fetch_gpt2,
}
"""Function for each download."""
