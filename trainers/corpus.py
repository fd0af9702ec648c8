"""Texts as token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.standin import gatsby_standin
from trajstore.errors import CorpusError

__all__ = ["ASCII_SIZE", "Corpus", "ascii_corpus", "load_corpus"]

ASCII_SIZE = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A tokenized text.

    Attributes
    ----------
    name : str
        File name, or what stands in for it.
    ids : ndarray of int64
    size, sha256 : int, str
        Of the bytes it was made from.
    token_text : tuple of str
        How each id of the vocabulary reads.
    """

    name: str
    ids: npt.NDArray[np.int64]
    size: int
    sha256: str
    token_text: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of ids that there are."""
        return len(self.token_text)

    def counts(self) -> npt.NDArray[np.int64]:
        """Occurrences of each id."""
        return np.bincount(self.ids, minlength=self.vocab_size)

    def provenance(self) -> dict[str, Any]:
        """What identifies the text."""
        return {"name": self.name, "bytes": self.size, "sha256": self.sha256}


def _ascii_text(byte: int) -> str:
    return chr(byte) if chr(byte).isprintable() else repr(chr(byte))[1:-1]


def ascii_corpus(data: bytes, name: str) -> Corpus:
    """Corpus of one token per byte.

    Raises
    ------
    CorpusError
        If it is empty, or a byte is not ASCII.
    """
    if not data:
        raise CorpusError(f"the corpus {name} is empty; give a plain ASCII text")
    ids = np.frombuffer(data, np.uint8)
    foreign = np.flatnonzero(ids >= ASCII_SIZE)
    if foreign.size:
        at = int(foreign[0])
        line = data.count(b"\n", 0, at) + 1
        raise CorpusError(
            f"the corpus {name} has {foreign.size} bytes that are not ASCII, the first "
            f"(0x{data[at]:02x}) in line {line}; replace accented letters and typographic quotes, "
            "for example with: iconv -f utf-8 -t ascii//TRANSLIT"
        )
    return Corpus(
        name=name,
        ids=ids.astype(np.int64),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        token_text=tuple(_ascii_text(byte) for byte in range(ASCII_SIZE)),
    )


def load_corpus(path: str | Path | None, *, shortest: int) -> Corpus:
    """Corpus at a path, or the embedded one.

    Parameters
    ----------
    path : path-like, optional
        A plain ASCII text; without it the embedded stand-in for The Great Gatsby.
    shortest : int
        Tokens that one training example needs.

    Raises
    ------
    CorpusError
        If the text cannot be read, is empty, not ASCII, or shorter than one example.
    """
    if path is None:
        corpus = ascii_corpus(gatsby_standin(), "gatsby stand-in (embedded)")
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read the corpus {path}: {error.strerror}") from error
        corpus = ascii_corpus(data, Path(path).name)
    if corpus.ids.size < shortest:
        raise CorpusError(
            f"the corpus {corpus.name} has {corpus.ids.size} tokens, and one training example "
            f"needs {shortest}; give a longer text, or a smaller model.context"
        )
    return corpus
