"""The tokenizer of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_info import attribute
from trajstore.trainers.texts.fetch import cached
from trajstore.trainers.texts.tokenizer import AsciiTokenizer, FileTokenizer, Tokenizer


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
    if attribute(attributes, "provenance", "tokenizer", "name") == AsciiTokenizer.name:
        return AsciiTokenizer()
    sha256 = attribute(attributes, "provenance", "tokenizer", "sha256")
    path = None if sha256 is None else cached("gpt2")
    found = None if path is None else FileTokenizer(path)
    return found if found is not None and found.sha256 == sha256 else None


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
    found = find_tokenizer(attributes, given)
    if found is None:
        name = attribute(attributes, "provenance", "tokenizer", "name")
        reason = "records no tokenizer" if name in (None, "none") else f"needs the tokenizer {name}"
        raise InvalidArgument(f"the run {reason}; give one: tokenizer='ascii', or tokenizer=FOLDER")
    return found
