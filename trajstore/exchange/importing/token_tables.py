"""Tokens of the rows of a file: their ids, which are dead, and how often they occur.

Sources are masks along the vocabulary, lists of ids, counts of occurrences, and sizes of the
populations, in the file itself or in another one. All sources must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.guessing.detect_arrays import DetectedArray
from trajstore.formats.array_file import ArrayFile, labels_of

Array = npt.NDArray[Any]

TOKEN_KINDS = (
    "dead_mask",
    "live_mask",
    "dead_ids",
    "live_ids",
    "token_ids",
    "token_count",
    "token",
)
"""Kinds of arrays that describe the tokens."""

POPULATION_SIZES = {
    **dict.fromkeys(
        "n_dead n_untrained num_dead num_untrained dead_count dead_tokens untrained_tokens".split(),
        "dead",
    ),
    **dict.fromkeys(
        "n_live n_trained num_live num_trained live_count live_tokens trained_tokens".split(),
        "live",
    ),
}
"""Names of the numbers of dead or live tokens."""


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
    note : str
        Note on how its kind was found, if not by its name.
    """

    name: str
    kind: str
    values: Array
    by_place: bool = False
    is_separate: bool = False
    note: str = ""

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
    coordinates: dict[str, Array]
    vocabulary: int
    notes: tuple[str, ...] = ()


def token_arrays(
    file: ArrayFile, found: Iterable[DetectedArray], *, of: str = ""
) -> list[TokenArray]:
    """Arrays of a file that describe the tokens, with checked types.

    Parameters
    ----------
    file : ArrayFile
    found : iterable of DetectedArray
    of : str, optional
        Suffix of the names in messages.

    Raises
    ------
    FormatError
        If a mask holds values other than 0 and 1, ids are negative or repeated, or an array is not
        1-D.
    """
    arrays = []
    for one in found:
        if one.kind.name not in TOKEN_KINDS:
            continue
        values = labels_of(file, one.key)
        name = f"{one.key}{of}"
        if values.ndim != 1:
            differs = " (it differs between files)" if file.format == "folder" else ""
            raise FormatError(
                f"{file.path}: {name} has shape {values.shape}{differs}, expected one dimension; "
                f"omit it with --map ignore={one.key}"
            )
        if one.kind.values == "truth":
            if values.dtype != bool and ((values < 0) | (values > 1)).any():
                raise FormatError(
                    f"{file.path}: {name} holds values from {values.min()} to {values.max()}, "
                    "expected 0 and 1"
                )
            arrays.append(TokenArray(name=name, kind=one.kind.name, values=values.astype(bool)))
            continue
        if len(values) and (int(values.min()) < 0 or int(values.max()) >= 1 << 62):
            what = "token ids" if one.kind.name != "token_count" else "counts"
            raise FormatError(
                f"{file.path}: {name} holds values from {values.min()} to {values.max()}, expected "
                f"{what} of at least 0"
            )
        values = values.astype(np.int64)
        if one.kind.name != "token_count" and len(np.unique(values)) != len(values):
            raise FormatError(f"{file.path}: {name} repeats an id, expected distinct ids")
        note = one.note and f"{name}: {one.note}"
        arrays.append(TokenArray(name=name, kind=one.kind.name, values=values, note=note))
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
    arrays, notes = _resolved(where, tokens, list(arrays))
    arrays = _counted_by_place(tokens, arrays, by_place=by_place)
    length, from_ = _vocabulary(where, arrays, sizes)
    token, restricted = _rows(where, tokens, arrays, length, from_, rows_of)
    if length is not None and int(token.max(initial=-1)) >= length:
        raise FormatError(
            f"{where}: {from_} means {length} tokens, but by other arrays {rows_of} has a row of "
            f"token {token.max()}; omit one with --map ignore={from_}"
        )
    if len(token) and int(token.max()) > np.iinfo(np.int32).max:
        raise FormatError(
            f"{where}: got token {token.max()}, expected 32-bit vocabulary ids up to "
            f"{np.iinfo(np.int32).max}"
        )
    certain = length is not None or not restricted
    universe = max(length or 0, int(token.max(initial=-1)) + 1)
    for each in arrays:
        limit = tokens if each.by_place else universe
        if each.kind.endswith("_ids") and len(each.values) and int(each.values.max()) >= limit:
            if each.by_place or certain:
                what = "positions" if each.by_place else "token ids"
                raise FormatError(
                    f"{where}: {each.name} holds {each.values.max()}, expected {what} from 0 to "
                    f"{limit - 1}"
                )
            universe = int(each.values.max()) + 1
    coordinates = _dead(where, arrays, universe, token, numbers, certain=certain)
    counts = [each for each in arrays if each.kind == "token_count"]
    if not coordinates:
        counted = [f"{key} {numbers[key]}" for key in numbers if key.lower() in POPULATION_SIZES]
        only = f", only their number ({', '.join(counted)})" if counted else ""
        notes.append(f"the file does not label dead tokens{only}")
    elif {each.kind for each in arrays} <= {"token", "token_count"}:
        notes.append(
            f"dead tokens are those for which {counts[0].name} is 0; nothing else labels them"
        )
    for each in counts[:1]:
        coordinates["token_count"] = each.values if each.by_place else each.values[token]
    return TokenTable(token=token, coordinates=coordinates, vocabulary=universe, notes=tuple(notes))


def _counted_by_place(tokens: int, arrays: list[TokenArray], *, by_place: bool) -> list[TokenArray]:
    """The arrays, marked if they refer to positions along the token axis.

    This holds in files of trajstore. In other files with the ids of the rows, it holds for masks as
    long as the axis, and for two lists that together contain every position.
    """
    if not any(each.kind == "token" for each in arrays):
        return arrays
    lists = [each.values for each in arrays if each.kind in ("dead_ids", "live_ids")]
    every = np.sort(np.concatenate(lists)) if len(lists) == 2 else np.empty(0)
    by_place = by_place or np.array_equal(every, np.arange(tokens))
    marked = []
    for each in arrays:
        listed = each.kind in ("dead_ids", "live_ids")
        places = len(each.values) == tokens if each.is_dense else listed and by_place
        marked.append(replace(each, by_place=places and not each.is_separate))
    return marked


def _resolved(
    where: Any, tokens: int, arrays: list[TokenArray]
) -> tuple[list[TokenArray], list[str]]:
    """The arrays and notes. A list without a stated meaning becomes the ids of the rows."""
    resolved, notes = [], []
    for each in arrays:
        notes += [each.note] if each.note else []
        if each.kind != "token_ids":
            resolved.append(each)
        elif len(each.values) == tokens:
            resolved.append(replace(each, kind="token"))
            if each.is_separate:
                notes.append(f"{each.name}: the ids of the rows, since the lengths match")
        elif each.is_separate:
            raise FormatError(
                f"{where}: {each.name} lists {len(each.values)} tokens, but there are rows of "
                f"{tokens}, so they are not the ids of the rows; if they are dead or live tokens, "
                "rename the array, or the .npy, to dead_ids or live_ids"
            )
        else:
            notes.append(
                f"{each.name} omitted: it lists {len(each.values)} tokens without their kind; name "
                f"it with --map dead_ids={each.name} or --map live_ids={each.name}"
            )
    return resolved, notes


def _vocabulary(
    where: Any, arrays: list[TokenArray], sizes: Mapping[str, int]
) -> tuple[int | None, str]:
    """Length of the vocabulary, and the name of its source."""
    lengths = [
        (each.name, len(each.values)) for each in arrays if each.is_dense and not each.by_place
    ]
    lengths += sizes.items()
    for name, length in lengths:
        if length != lengths[0][1]:
            raise FormatError(
                f"{where}: {lengths[0][0]} means {lengths[0][1]} tokens, but {name} means "
                f"{length}; omit one with --map ignore={name}"
            )
    return lengths[0][::-1] if lengths else (None, "")


def _rows(
    where: Any, tokens: int, arrays: list[TokenArray], length: int | None, from_: str, rows_of: str
) -> tuple[Array, bool]:
    """Ids of the rows, and True if they are only a part of the vocabulary."""
    given = [each for each in arrays if each.kind == "token"]
    for each in given:
        if len(each.values) != tokens:
            raise FormatError(
                f"{where}: {each.name} has {len(each.values)} ids, but {rows_of} has {tokens} "
                "tokens"
            )
        if not np.array_equal(each.values, given[0].values):
            raise FormatError(
                f"{where}: {given[0].name} and {each.name} hold different ids; omit one with --map "
                f"ignore={each.name}"
            )
    if given:
        return given[0].values, True
    whole = np.arange(tokens, dtype=np.int64)
    if length == tokens:
        return whole, False
    lists = {
        population: [
            (each.name, each.ids)
            for each in arrays
            if each.kind in (f"{population}_ids", f"{population}_mask")
        ]
        for population in ("dead", "live")
    }
    if length is None and _is_whole(tokens, lists):
        return whole, False
    fitting = {
        population: (name, ids)
        for population, named in lists.items()
        for name, ids in named
        if len(ids) == tokens
    }
    if len(fitting) == 2:
        raise FormatError(
            f"{where}: {rows_of} has {tokens} tokens, as many as {fitting['dead'][0]} and as "
            f"{fitting['live'][0]}; choose with --map token={fitting['dead'][0]}"
        )
    if fitting:
        ((_, ids),) = fitting.values()
        return ids, True
    if length is not None:
        raise FormatError(
            f"{where}: {from_} means {length} tokens, but {rows_of} has {tokens} with unknown ids; "
            f"use --map token=NAME, or --map ignore={from_}"
        )
    return whole, False


def _is_whole(tokens: int, lists: Mapping[str, list[tuple[str, Array]]]) -> bool:
    """True if lists of ids alone imply that every token has a row."""
    every = [ids for named in lists.values() for _, ids in named]
    if not every:
        return True
    if lists["dead"] and lists["live"]:
        return len(lists["dead"][0][1]) + len(lists["live"][0][1]) == tokens
    return all(len(ids) != tokens or int(ids.max(initial=0)) < tokens for ids in every)


def _dead(
    where: Any,
    arrays: list[TokenArray],
    universe: int,
    token: Array,
    numbers: Mapping[str, Any],
    *,
    certain: bool,
) -> dict[str, Array]:
    """``is_dead``, on which all sources and the sizes agree; nothing without a source."""
    # Counts come last: they label dead tokens only if nothing else does.
    tables = sorted(
        (each for each in arrays if each.kind not in ("token", "token_ids")),
        key=lambda each: each.kind == "token_count",
    )
    if not tables:
        return {}
    whole = [each for each in tables if not each.by_place]
    if any(each.is_dense for each in whole):
        ids = np.arange(universe)
    else:  # no mask covers the vocabulary: its length is only a number in the file
        ids = np.unique(np.concatenate([token, *(each.values for each in whole)]))
    every = {each.name: _is_dead(each, ids) for each in whole}
    _agree(where, every)
    places = np.arange(len(token))
    answers = {each.name: _is_dead(each, places if each.by_place else token) for each in tables}
    _agree(where, answers)
    name, here = next(iter(answers.items()))
    known = next(iter(every.values()), here)
    dead = int(np.count_nonzero(known))
    counts = {"dead": dead, "live": (universe if every else len(known)) - dead}
    for key, value in numbers.items():
        population = POPULATION_SIZES.get(key.lower())
        if population is None or not isinstance(value, int):
            continue
        count, held = counts[population], int(np.count_nonzero(here == (population == "dead")))
        if value not in (count, held) and (certain or held):
            raise FormatError(
                f"{where}: {key} is {value}, but {name} marks {count} tokens as {population}; "
                f"omit one with --map ignore={key}"
            )
    return {"is_dead": here}


def _is_dead(each: TokenArray, ids: Array) -> Array:
    """True for the ids, or positions, of dead tokens."""
    if each.kind in ("dead_ids", "live_ids"):
        return np.asarray(np.isin(ids, each.values) == (each.kind == "dead_ids"))
    of_dead = 0 if each.kind == "token_count" else each.kind == "dead_mask"
    return np.asarray(each.values[ids] == of_dead)


def _agree(where: Any, answers: Mapping[str, Array]) -> None:
    first = next(iter(answers), None)
    for other in answers:
        wrong = np.flatnonzero(answers[first or other] != answers[other])
        if len(wrong):
            raise FormatError(
                f"{where}: {first} and {other} disagree about {len(wrong)} dead tokens, the first "
                f"is {wrong[0]}; omit one with --map ignore={other}"
            )
