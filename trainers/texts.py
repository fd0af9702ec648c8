"""Texts as token ids, the embedded ones, tokenizers, and the tokenizer of a run."""

from __future__ import annotations

import bz2
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import ConfigError, CorpusError, InvalidArgument, needs_extra
from trajstore.provenance import RunAttributes
from trajstore.trainers.downloads import cached

if TYPE_CHECKING:
    from trajstore.trainers.config import RunConfig

ASCII_SIZE = 128


class AsciiTokenizer:
    """One token per byte of plain ASCII."""

    name = "ascii"
    sha256 = ""
    vocab_size = ASCII_SIZE

    def ids(self, data: bytes, name: str) -> npt.NDArray[np.int64]:
        """Return the token ids of a text.

        Raises
        ------
        CorpusError
            If a byte is not ASCII; the message has its line.
        """
        ids = np.frombuffer(data, np.uint8)
        foreign = np.flatnonzero(ids >= ASCII_SIZE)
        if foreign.size:
            position = int(foreign[0])
            line = data.count(b"\n", 0, position) + 1
            raise CorpusError(
                f"the corpus {name} has {foreign.size} bytes that are not ASCII, the first "
                f"(0x{data[position]:02x}) in line {line}; replace accented letters and "
                "typographic quotes, for example with: iconv -f utf-8 -t ascii//TRANSLIT"
            )
        return ids.astype(np.int64)

    def texts(self) -> tuple[str, ...]:
        """Return the text of each token."""
        return tuple(_printable(chr(byte)) for byte in range(ASCII_SIZE))

    def pretrained(self) -> Any:
        """Return an equal tokenizer of transformers. It raises an error for other characters."""
        with needs_extra("a tokenizer", "train"):
            from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast
        vocabulary = {chr(byte): byte for byte in range(ASCII_SIZE)}
        # Its own symbol is not in the vocabulary, so no character is replaced silently.
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        fast: Any = PreTrainedTokenizerFast  # whose constructor has no types
        return fast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


class FileTokenizer:
    """A tokenizer from a folder of `save_pretrained`, or from a ``tokenizer.json``.

    Parameters
    ----------
    path : path-like
        Read from disk only; nothing is downloaded.

    Raises
    ------
    InvalidArgument
        If there is nothing at `path`.
    CorpusError
        If `path` is not a tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        if not path.exists():
            raise InvalidArgument(
                f"there is no tokenizer at {path}; give a folder or a tokenizer.json, or run: "
                "trajstore fetch gpt2"
            )
        with needs_extra("a tokenizer", "train"):
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
        try:
            loaded: Any
            if path.is_file():
                fast: Any = PreTrainedTokenizerFast  # whose constructor has no types
                loaded = fast(tokenizer_file=str(path))
            else:
                loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            self._loaded = loaded
            self._backend = loaded.backend_tokenizer
        # The libraries underneath raise bare Exception for a malformed file.
        except Exception as error:
            raise CorpusError(
                f"cannot load a tokenizer from {path}: {error}; give a folder with a tokenizer.json"
            ) from error
        self.name = path.parent.name if path.is_file() else path.resolve().name
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.sha256 = hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def ids(self, data: bytes, name: str) -> npt.NDArray[np.int64]:
        """Return the token ids of a text, without special tokens.

        Raises
        ------
        CorpusError
            If the text is not UTF-8.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"the corpus {name} is not UTF-8 (byte {error.start}: {error.reason}); convert it, "
                "for example with: iconv -t utf-8"
            ) from error
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int64)

    def texts(self) -> tuple[str, ...]:
        """Return the text of each token; a part of a character has the symbol of its token."""
        return token_texts(self._backend)

    def pretrained(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._loaded


Tokenizer = AsciiTokenizer | FileTokenizer


def token_texts(backend: Any) -> tuple[str, ...]:
    """Return the text of each token; a part of a character has the symbol of its token.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    """
    ids = range(backend.get_vocab_size(with_added_tokens=True))
    decoded = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return tuple(
        _printable(text) if text and "\ufffd" not in text else backend.id_to_token(i) or ""
        for i, text in zip(ids, decoded, strict=True)
    )


def _printable(text: str) -> str:
    """Return a text, with escapes for characters that a terminal acts on.

    >>> _printable("the"), _printable("a\\tb")
    ('the', 'a\\\\tb')
    """
    return text if text.isprintable() else repr(text)[1:-1]


_IDS = 475_160  # ids of the embedded stream, as many as the notebooks' web text has
_SEED = 1925


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A tokenized text.

    Attributes
    ----------
    name : str
        File name, or the name of the embedded text.
    ids : ndarray of int64
    vocab_size : int
        Size of the vocabulary.
    size, sha256 : int, str
        Size and hash of the bytes of the text.
    tokenizer : dict of str to str
        Name and sha256 of the tokenizer.
    token_text : tuple of str, optional
        Text of each token, if there is a tokenizer.
    """

    name: str
    ids: npt.NDArray[np.int64]
    vocab_size: int
    size: int
    sha256: str
    tokenizer: dict[str, str]
    token_text: tuple[str, ...] | None

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the occurrences of each id."""
        return np.bincount(self.ids, minlength=self.vocab_size)

    def provenance(self) -> dict[str, Any]:
        """Return what identifies the text and the tokenizer."""
        text = {"name": self.name, "bytes": self.size, "sha256": self.sha256}
        return {"corpus": text, "tokenizer": self.tokenizer}


def tokenize(data: bytes, tokenizer: Tokenizer, name: str) -> Corpus:
    """Return the corpus of a text.

    Raises
    ------
    CorpusError
        If the text is empty, or the tokenizer cannot encode it.
    """
    if not data:
        raise CorpusError(f"the corpus {name} is empty; give a plain text")
    return _corpus(name, data, tokenizer.ids(data, name), tokenizer.vocab_size, tokenizer)


def tokenize_file(path: Path, tokenizer: Tokenizer) -> Corpus:
    """Return the corpus of a text in a file.

    Raises
    ------
    CorpusError
        As `tokenize`.
    InvalidArgument
        If the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"cannot read the corpus {path}: {error.strerror}; give a readable text file"
        ) from error
    return tokenize(data, tokenizer, path.name)


def _corpus(
    name: str,
    data: bytes,
    ids: npt.NDArray[np.int64],
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> Corpus:
    identity = {"name": tokenizer.name if tokenizer else "none"}
    if tokenizer and tokenizer.sha256:
        identity["sha256"] = tokenizer.sha256
    return Corpus(
        name=name,
        ids=ids,
        vocab_size=vocab_size,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        tokenizer=identity,
        token_text=tokenizer.texts() if tokenizer else None,
    )


def embedded_text() -> bytes:
    """Return the substitute of The Great Gatsby: 265,905 bytes of ASCII, 77 distinct ones."""
    packed = resources.files(__package__).joinpath("embedded_corpus.txt.bz2").read_bytes()
    return bz2.decompress(packed)


def id_stream(vocab_size: int, live: int) -> npt.NDArray[np.int64]:
    """Return a stream of token ids in which exactly `live` of `vocab_size` ids occur.

    It replaces a text if there is no tokenizer. It uses only the raw bits of NumPy's PCG64, which
    NumPy guarantees, so it is the same everywhere.

    Parameters
    ----------
    vocab_size, live : int
        ``1 <= live <= vocab_size``.

    Returns
    -------
    ndarray of int64
        475,160 ids, or `live` if that is more, independent of each other. The frequency of the n-th
        most frequent id is about 1/(n + 2.7). Every live id occurs at least once.
    """
    bits = np.random.PCG64(_SEED).random_raw
    ids = np.argsort(bits(vocab_size), kind="stable")[:live]
    size = max(_IDS, live)
    cumulative = np.cumsum(1 / (np.arange(live) + 3.7))
    uniform = (bits(size - live) >> np.uint64(11)) * 2.0**-53
    drawn = ids[np.searchsorted(cumulative[:-1], uniform * cumulative[-1], side="right")]
    stream = np.concatenate([ids, drawn])
    return stream[np.argsort(bits(size), kind="stable")].astype(np.int64)


def load_corpus(
    config: RunConfig,
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Return the text of a run: from the given path, else the cache, else the embedded one.

    Parameters
    ----------
    config : RunConfig
    corpus : path-like, optional
        A text: plain ASCII for the tokenizer ``ascii``, otherwise UTF-8.
    tokenizer : path-like, optional
        Replaces the tokenizer of the configuration.

    Raises
    ------
    InvalidArgument
        If the text cannot be read.
    CorpusError
        If the tokenizer cannot be read, or the text is empty, of another encoding, or shorter than
        one training example.
    ConfigError
        If the vocabulary of the model differs from the tokenizer's, or a text has no tokenizer.
    """
    data, model = config.data, config.model
    maker = _tokenizer(data.tokenizer, tokenizer)
    if maker is not None and maker.vocab_size != model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}, but the tokenizer {maker.name} has "
            f"{maker.vocab_size} tokens; set model.vocab_size={maker.vocab_size} or give another "
            "tokenizer"
        )
    path = Path(corpus) if corpus is not None else cached(data.corpus) if maker else None
    if path is not None:
        if maker is None:
            raise ConfigError(
                "data.tokenizer = 'none': a text needs a tokenizer; give tokenizer=PATH"
                if data.tokenizer == "none"
                else f"data.tokenizer = {data.tokenizer!r}: a text needs its tokenizer, which is "
                "not in the cache; give tokenizer=PATH, or run: trajstore fetch gpt2"
            )
        loaded = tokenize_file(path, maker)
    elif isinstance(maker, AsciiTokenizer):
        loaded = tokenize(embedded_text(), maker, "gatsby stand-in (embedded)")
    else:
        if data.live_tokens > model.vocab_size:
            raise ConfigError(
                f"data.live_tokens = {data.live_tokens}, but the model has only {model.vocab_size} "
                "tokens (model.vocab_size); set a smaller data.live_tokens"
            )
        ids = id_stream(model.vocab_size, data.live_tokens)
        stream = ids.astype("<i4").tobytes()
        loaded = _corpus("stream of ids (embedded)", stream, ids, model.vocab_size, maker)
    shortest = model.context + data.target_offset - 1
    if loaded.ids.size < shortest:
        raise CorpusError(
            f"the corpus {loaded.name} has {loaded.ids.size} tokens, but one training example "
            f"needs {shortest}; give a longer text, or a smaller model.context"
        )
    return loaded


def _tokenizer(name: str, path: str | os.PathLike[str] | None) -> Tokenizer | None:
    if path is not None:
        return FileTokenizer(path)
    if name == "ascii":
        return AsciiTokenizer()
    fetched = None if name == "none" else cached(name)
    return FileTokenizer(fetched) if fetched else None


def find_tokenizer(
    attributes: Mapping[str, Any], given: str | os.PathLike[str] | None = None
) -> Tokenizer | None:
    """Return the tokenizer of a run; None if it has none, or one that is not in the cache.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    given : path-like or str, optional
        A tokenizer to use instead: ``ascii``, a folder, or a ``tokenizer.json``.

    Raises
    ------
    InvalidArgument, CorpusError
        If the given tokenizer cannot be loaded.
    """
    if given is not None:
        return AsciiTokenizer() if given == "ascii" else FileTokenizer(given)
    recorded = RunAttributes.of(attributes).tokenizer
    if recorded.get("name") == AsciiTokenizer.name:
        return AsciiTokenizer()
    sha256 = recorded.get("sha256")
    path = None if sha256 is None else cached("gpt2")
    tokenizer = None if path is None else FileTokenizer(path)
    return tokenizer if tokenizer is not None and tokenizer.sha256 == sha256 else None


def run_tokenizer(
    attributes: Mapping[str, Any], given: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """Return the tokenizer of a run.

    Parameters
    ----------
    attributes, given
        As for `find_tokenizer`.

    Raises
    ------
    InvalidArgument
        If the run has none that is available.
    CorpusError
        If the given tokenizer cannot be loaded.
    """
    tokenizer = find_tokenizer(attributes, given)
    if tokenizer is None:
        name = RunAttributes.of(attributes).tokenizer.get("name")
        reason = "records no tokenizer" if name in (None, "none") else f"needs the tokenizer {name}"
        raise InvalidArgument(f"the run {reason}; give one: tokenizer='ascii', or tokenizer=FOLDER")
    return tokenizer
