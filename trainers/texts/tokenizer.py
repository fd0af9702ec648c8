"""Tokenizers: one token per ASCII byte, or any tokenizer that `transformers` loads from a path."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trajstore.errors import CorpusError, InvalidArgument

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
            at = int(foreign[0])
            line = data.count(b"\n", 0, at) + 1
            raise CorpusError(
                f"the corpus {name} has {foreign.size} bytes that are not ASCII, the first "
                f"(0x{data[at]:02x}) in line {line}; replace accented letters and typographic "
                "quotes, for example with: iconv -f utf-8 -t ascii//TRANSLIT"
            )
        return ids.astype(np.int64)

    def texts(self) -> tuple[str, ...]:
        """Return the text of each token."""
        return tuple(_printable(chr(byte)) for byte in range(ASCII_SIZE))

    def pretrained(self) -> Any:
        """Return an equal tokenizer of transformers. It raises an error for other characters."""
        vocabulary = {chr(byte): byte for byte in range(ASCII_SIZE)}
        # Its own symbol is not in the vocabulary, so no character is replaced silently.
        backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
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
