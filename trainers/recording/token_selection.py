"""Selection of the recorded tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajstore.arguments import ANY, exact
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import EVERYTHING

Tokens = str | npt.ArrayLike
"""``all``, ``dead``, ``live``, or ids."""


def check_all_tokens(variables: Iterable[str], tokens: Tokens) -> None:
    """Check that a run with the state of the whole model has the whole matrix.

    Raises
    ------
    InvalidArgument
        If some tokens only are to be recorded.
    """
    shown = tokens if isinstance(tokens, str) else "a list of ids"
    if shown != "all" and (held := [name for name in EVERYTHING if name in set(variables)]):
        raise InvalidArgument(
            f"tokens: got {shown}, but {held[0]} is recorded with all tokens of the matrix; "
            "leave out tokens, or select tokens after recording"
        )


def select_tokens(
    tokens: Tokens, vocab_size: int, is_dead: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64] | None:
    """Return the ids of the recorded tokens in increasing order; None for all.

    Parameters
    ----------
    tokens : {'all', 'dead', 'live'} or array_like of int
    vocab_size : int
    is_dead : ndarray of bool, (token,), optional
        Needed for ``dead`` and ``live``.

    Raises
    ------
    InvalidArgument
        If the text is unknown, an id is not in the vocabulary, no token is left, or the dead tokens
        are not known.
    """
    if isinstance(tokens, str):
        if tokens == "all":
            return None
        if tokens not in ("dead", "live"):
            raise InvalidArgument(
                f"tokens: got {tokens!r}, expected all, dead, live or a list of ids"
            )
        if is_dead is None:
            raise InvalidArgument(
                f"tokens: got {tokens!r}, but the dead tokens are not known; give is_dead, one "
                "value for each token"
            )
        if not (ids := np.flatnonzero(is_dead == (tokens == "dead"))).size:
            raise InvalidArgument(
                f"tokens: none of the {vocab_size} tokens is {tokens}, so there is nothing to "
                "record; choose other tokens"
            )
        return ids
    if not (ids := np.unique(exact("tokens", tokens, "int64", least=ANY))).size:
        raise InvalidArgument("tokens: got an empty list, expected at least one token id")
    if (unknown := ids[(ids < 0) | (ids >= vocab_size)]).size:
        shown = ", ".join(map(str, unknown[:5])) + (" …" if unknown.size > 5 else "")
        raise InvalidArgument(
            f"tokens: {unknown.size} ids are not in the vocabulary ({shown}); expected 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def read_tokens(path: str | os.PathLike[str]) -> npt.NDArray[np.int64]:
    """Read token ids from a text file: integers between white space; ``#`` starts a comment.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, is empty, or has anything else.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        near = did_you_mean(str(path), ("all", "dead", "live"))
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(
            f"tokens: got {str(path)!r}{near}, expected all, dead, live or a text file with ids "
            f"({reason})"
        ) from error
    ids = []
    for number, line in enumerate(lines, 1):
        for word in line.split("#")[0].split():
            if not word.isdecimal():
                raise InvalidArgument(
                    f"tokens: {path}, line {number}: got {word!r}, expected a token id"
                )
            ids.append(int(word))
    if not ids:
        raise InvalidArgument(f"tokens: {path} has no token id, expected at least one")
    return np.array(ids, np.int64)
