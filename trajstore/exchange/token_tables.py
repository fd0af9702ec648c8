"""Tokens of the rows of a file: their ids, which are dead, and how often they occur.

Sources are masks along the vocabulary, lists of ids, counts of occurrences, and sizes of the
populations, in the file itself or in another one (``masks``). All sources must agree. Rows are
the tokens 0, 1, 2, … unless an array ``token`` holds their ids. A mask as long as such an array
marks the rows, any other mask the vocabulary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, RunNotFound
from trajstore.exchange.guessed_layout import abridged, fits, guess, unfit
from trajstore.exchange.layouts import TOKEN_KINDS, Column
from trajstore.exchange.usual_names import POPULATION_SIZES
from trajstore.formats.array_file import ArrayFile, contradiction, labels_of
from trajstore.formats.open_file import open_file
from trajstore.strict_json import parse

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TokenArray:
    """An array that describes the tokens.

    Attributes
    ----------
    name : str
        Name of the array, for messages.
    kind : str
        One of `TOKEN_KINDS`.
    values : ndarray
    by_place : bool
        True if it refers to positions along the token axis, not to vocabulary ids.
    is_separate : bool
        True if it comes from another file than the rows, given by ``masks``.
    """

    name: str
    kind: str
    values: Array
    by_place: bool = False
    is_separate: bool = False

    @property
    def is_dense(self) -> bool:
        """True for masks and counts, which have a value per token."""
        return self.kind.endswith("_mask") or self.kind == "token_count"

    @property
    def ids(self) -> Array:
        """Ids in a list, or those that a mask marks."""
        return np.flatnonzero(self.values) if self.kind.endswith("_mask") else self.values


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """The tokens of the rows.

    Attributes
    ----------
    token : ndarray of int64, (token,)
        Vocabulary ids.
    coordinates : dict of str to ndarray
        ``is_dead`` and ``token_count``, as far as they are known.
    vocabulary : int
        Number of ids, as far as it is known.
    notes : tuple of str
    """

    token: Array
    coordinates: dict[str, Any]
    vocabulary: int
    notes: tuple[str, ...] = ()


def token_arrays(file: ArrayFile, columns: Iterable[Column], *, of: str = "") -> list[TokenArray]:
    """Arrays of a file that describe the tokens, with checked types.

    Parameters
    ----------
    file : ArrayFile
    columns : iterable of Column
    of : str, optional
        Suffix of the names in messages.

    Raises
    ------
    FormatError
        If a mask holds values other than 0 and 1, ids are negative or repeated, or an array is not
        1-D.
    """
    arrays = []
    for column in columns:
        if column.kind not in TOKEN_KINDS:
            continue
        if not fits(file, column):
            raise unfit(file, column)
        values, kind, name = labels_of(file, column.key), column.kind, f"{column.key}{of}"
        if values.ndim != 1:
            differs = " (it differs between files)" if file.format == "folder" else ""
            raise contradiction(
                file.path,
                f"{name} has shape {values.shape}{differs}, expected one dimension",
                column.key,
            )
        is_mask = kind.endswith("_mask")
        most, what = (1, "0 and 1") if is_mask else ((1 << 62) - 1, "token ids of at least 0")
        if kind == "token_count":
            what = "counts of at least 0"
        if len(values) and (int(values.min()) < 0 or int(values.max()) > most):
            raise FormatError(
                f"{file.path}: {name} holds values from {values.min()} to {values.max()}, expected "
                f"{what}"
            )
        values = values.astype(bool if is_mask else np.int64)
        is_list = kind.endswith("ids") or kind == "token"
        if is_list and len(np.unique(values)) != len(values):
            raise FormatError(f"{file.path}: {name} repeats an id, expected distinct ids")
        arrays.append(TokenArray(name=name, kind=kind, values=values))
    return arrays


def token_table(
    where: Any,
    tokens: int,
    arrays: Iterable[TokenArray],
    numbers: Mapping[str, Any],
    *,
    sizes: Mapping[str, int],
    rows_of: str = "W",
    by_place: bool = False,
) -> TokenTable:
    """Combine everything that describes the tokens of an array.

    Parameters
    ----------
    where : path-like
        Path of the file, for messages.
    tokens : int
        Length of the token axis.
    arrays : iterable of TokenArray
    numbers : mapping of str to number
        Single numbers of the file, some of them sizes of the populations.
    sizes : mapping of str to int
        Numbers that are the size of the vocabulary.
    rows_of : str, default 'W'
        Name of the array, for messages.
    by_place : bool
        True if lists of dead or live tokens hold positions, in a file with the ids of the rows.

    Raises
    ------
    FormatError
        If two sources contradict each other, or one does not fit the axis.
    """
    given = [each for each in arrays if each.kind == "token"]
    marks = [
        replace(each, by_place=_is_by_place(each, tokens, lists=by_place) if given else False)
        for each in arrays
        if each.kind != "token"
    ]
    length, from_ = _vocabulary(where, marks, sizes)
    token = _rows(where, tokens, given, rows_of)
    if not given and length not in (None, tokens):
        raise FormatError(
            f"{where}: {from_} means {length} tokens, but {rows_of} has {tokens} with unknown ids; "
            f"name the array of their ids with map={{'token': 'NAME'}}, or omit {from_} with "
            f"map={{'ignore': {from_!r}}}"
        )
    if length is not None and int(token.max(initial=-1)) >= length:
        raise contradiction(
            where,
            f"{from_} means {length} tokens, but by other arrays {rows_of} has a row of token "
            f"{token.max()}",
            from_,
        )
    if len(token) and int(token.max()) > np.iinfo(np.int32).max:
        raise FormatError(
            f"{where}: got token {token.max()}, expected 32-bit vocabulary ids up to "
            f"{np.iinfo(np.int32).max}"
        )
    for each in marks:
        limit = tokens if each.by_place or not given else length
        if limit is not None and not each.is_dense and int(each.values.max(initial=0)) >= limit:
            what = "positions" if each.by_place else "token ids"
            fix = (
                "; name the array of the ids of the rows with map={'token': 'NAME'}, or say in a "
                'layout which tokens the rows are (tokens = "dead")'
            )
            raise FormatError(
                f"{where}: {each.name} holds {each.values.max()}, expected {what} from 0 to "
                f"{limit - 1}{'' if given else fix}"
            )
    coordinates = _dead(where, marks, token, numbers, is_whole=not given)
    counts = [each for each in marks if each.kind == "token_count"]
    notes = []
    if not coordinates:
        counted = [f"{key} {numbers[key]}" for key in numbers if key.lower() in POPULATION_SIZES]
        only = f", only their number ({', '.join(counted)})" if counted else ""
        notes.append(f"the file does not label dead tokens{only}")
    elif len(counts) == len(marks):
        notes.append(
            f"dead tokens are those for which {counts[0].name} is 0; nothing else labels them"
        )
    for each in counts[:1]:
        coordinates["token_count"] = each.values if each.by_place else each.values[token]
    notes += [
        f"{each.name} lists no token of the rows"
        for each in marks
        if given and not (each.is_dense or each.by_place or np.isin(each.values, token).any())
    ]
    universe = max(length or 0, int(token.max(initial=-1)) + 1)
    return TokenTable(token=token, coordinates=coordinates, vocabulary=universe, notes=tuple(notes))


def _is_by_place(each: TokenArray, tokens: int, *, lists: bool) -> bool:
    """True if an array beside the ids of the rows refers to the rows, not to the vocabulary."""
    return not each.is_separate and (len(each.values) == tokens if each.is_dense else lists)


def _vocabulary(
    where: Any, marks: list[TokenArray], sizes: Mapping[str, int]
) -> tuple[int | None, str]:
    """Length of the vocabulary, and the name of its source."""
    sources = [each for each in marks if each.is_dense and not each.by_place]
    lengths = [len(each.values) for each in sources] + list(sizes.values())
    sources += [TokenArray(name=key, kind="size", values=np.empty(0)) for key in sizes]
    for each, length in zip(sources, lengths, strict=True):
        if length != lengths[0]:
            fault = f"{sources[0].name} means {lengths[0]} tokens, but {each.name} means {length}"
            raise _contradiction(where, fault, (sources[0], each))
    return (lengths[0], sources[0].name) if sources else (None, "")


def _contradiction(where: Any, fault: str, sources: Iterable[TokenArray]) -> FormatError:
    """The error of sources that disagree. Arrays of another file cannot be omitted one by one."""
    own = [each.name for each in sources if not each.is_separate]
    if not own:
        return FormatError(f"{where}: {fault}; correct the file of masks")
    return contradiction(where, fault, own[-1])


def _rows(where: Any, tokens: int, given: list[TokenArray], rows_of: str) -> Array:
    """Ids of the rows."""
    for each in given:
        if len(each.values) != tokens:
            raise FormatError(
                f"{where}: {each.name} has {len(each.values)} ids, but {rows_of} has {tokens} "
                "tokens"
            )
        if not np.array_equal(each.values, given[0].values):
            fault = f"{given[0].name} and {each.name} hold different ids"
            raise _contradiction(where, fault, (given[0], each))
    return given[0].values if given else np.arange(tokens, dtype=np.int64)


def _dead(
    where: Any,
    marks: list[TokenArray],
    token: Array,
    numbers: Mapping[str, Any],
    *,
    is_whole: bool,
) -> dict[str, Array]:
    """``is_dead``, on which all sources and the sizes agree; nothing without a source."""
    if not marks:
        return {}
    # Counts come last: they label dead tokens only if nothing else does.
    marks = sorted(marks, key=lambda each: each.kind == "token_count")
    places = np.arange(len(token))
    first, is_dead = marks[0], _is_dead(marks[0], places if marks[0].by_place else token)
    for each in marks[1:]:
        wrong = np.flatnonzero(is_dead != _is_dead(each, places if each.by_place else token))
        if len(wrong):
            raise _contradiction(
                where,
                f"{first.name} and {each.name} disagree about {len(wrong)} dead tokens, the first "
                f"is {token[wrong[0]]}",
                (first, each),
            )
    for key, value in numbers.items():
        population = POPULATION_SIZES.get(key.lower())
        if population is None or not isinstance(value, int):
            continue
        here = int(np.count_nonzero(is_dead == (population == "dead")))
        totals = [] if is_whole else [_total(each, population) for each in marks]
        known = [total for total in totals if total is not None]
        if value not in (here, *known) and (is_whole or known):
            raise contradiction(
                where,
                f"{key} is {value}, but {first.name} marks {here} tokens as {population}",
                key,
            )
    return {"is_dead": is_dead}


def _total(each: TokenArray, population: str) -> int | None:
    """Number of tokens of a population in the vocabulary, if an array tells it."""
    if each.by_place:
        return None
    if not each.is_dense:
        return len(each.values) if each.kind.startswith(population) else None
    dead = int(np.count_nonzero(_is_dead(each, np.arange(len(each.values)))))
    return dead if population == "dead" else len(each.values) - dead


def _is_dead(each: TokenArray, ids: Array) -> Array:
    """True for the ids, or positions, of dead tokens."""
    if each.kind in ("dead_ids", "live_ids"):
        return np.asarray(np.isin(ids, each.values) == (each.kind == "dead_ids"))
    of_dead = 0 if each.kind == "token_count" else each.kind == "dead_mask"
    return np.asarray(each.values[ids] == of_dead)


def masks_of(masks: str | os.PathLike[str]) -> tuple[TokenArray, ...]:
    """Masks, lists of ids and counts of a ``masks`` file.

    The name of a file of ``token_ids`` tells whether they are ``dead`` or ``live``.

    Raises
    ------
    RunNotFound, FormatError
        If the file does not exist, or holds none of them.
    """
    with open_file(masks) as file:
        arrays = token_arrays(file, guess(file).columns, of=f" of {Path(masks).name}")
        if not arrays:
            raise FormatError(
                f"{masks} labels no tokens: found {abridged(file.keys)}, expected masks, lists of "
                "ids or counts; rename an array, or the .npy, to dead_mask, untrained_mask, "
                "live_ids, trained_indices, token_counts, …"
            )
    populations = {*re.findall("dead|live", Path(masks).name)}
    if [array.kind for array in arrays] == ["token"] and len(populations) == 1:
        arrays = [replace(arrays[0], kind=f"{populations.pop()}_ids")]
    return tuple(replace(array, is_separate=True) for array in arrays)


def annotations_of(
    masks: str | os.PathLike[str], token: npt.NDArray[np.integer[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """``is_dead`` and ``token_count`` of a run's tokens, as far as a file holds them.

    Parameters
    ----------
    masks : path-like
        File in any format that imports accept as ``masks``.
    token : ndarray of int, (token,)
        Vocabulary ids of the run.

    Raises
    ------
    RunNotFound, FormatError
        If the file does not exist, labels no tokens, or does not fit the run's tokens.
    """
    ids = TokenArray(name="the run's tokens", kind="token", values=np.asarray(token, np.int64))
    arrays = [array for array in masks_of(masks) if array.kind != "token"]
    table = token_table(masks, len(token), [ids, *arrays], {}, sizes={}, rows_of="the run")
    coordinates = table.coordinates
    if not coordinates:
        raise FormatError(
            f"{masks} holds only the ids of tokens, expected labels of dead tokens or counts; name "
            "the array dead_ids, live_ids, dead_mask, live_mask or token_count"
        )
    return coordinates


def texts_of(path: str | os.PathLike[str], token: npt.NDArray[np.integer[Any]]) -> list[str]:
    """``token_text`` of a run's tokens, from a file.

    Parameters
    ----------
    path : path-like
        A JSON list with the text of each vocabulary id.
    token : ndarray of int, (token,)
        Vocabulary ids of the run.

    Raises
    ------
    RunNotFound
        If there is no such file.
    FormatError
        If the file is not such a list, or has no text for a token.
    """
    if not Path(path).is_file():
        raise RunNotFound(f"there is no file at {path}")
    try:
        texts = parse(Path(path).read_text("utf-8-sig"))
    except ValueError as error:
        raise FormatError(
            f'{path} is not JSON ({error}); write a list with a text for each token id: ["a", …]'
        ) from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FormatError(f'{path}: expected a list with a text for each token id: ["a", …]')
    if len(texts) <= (largest := int(token.max(initial=-1))):
        raise FormatError(
            f"{path} holds {len(texts)} texts, but the run has token {largest}; write a text for "
            f"each of the ids 0 to {largest}"
        )
    return [texts[number] for number in token]
