"""What each array of a file is taken for: by its name, its type and its shape; never silently.

A name that is in the table of `roles` decides, if rank and type fit it; an array of (step, token,
hidden) that is alone needs no name. What nothing is known of, or follows from the rest, is left out
and listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.guessing.number_reading import number_of_one, numbers_beside, vectors_beside
from trajstore.exchange.guessing.role_table import (
    AMBIGUOUS,
    ROLES,
    SCALARS,
    Name,
    Role,
    described_population,
    is_derived,
    named,
    scalar_of,
)
from trajstore.exchange.guessing.tied_matrices import tied
from trajstore.formats.array_file import ArrayFile, is_number, values_of
from trajstore.schema import TRAJECTORIES
from trajstore.values.native_types import NATIVE_TYPES

__all__ = ["IGNORE", "Found", "Recognised", "Taken", "abridged", "recognise"]

IGNORE = "ignore"
"""Role of arrays that are to be left out."""

_BITS = ("uint16", "int16")
_LISTS = ("dead_mask", "live_mask", "dead_ids", "live_ids")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A line of the table of what was taken for what.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    role : str
        What it was taken for; empty for what was left out.
    why : str
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An array that has a role.

    Attributes
    ----------
    key, dtype : str
    shape : tuple of int
    role : Role
    run, matrix, population, is_described
        As in `trajstore.exchange.guessing.role_table.Name`.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    run: int | None = None
    matrix: str | None = None
    population: str | None = None
    is_described: bool = False

    @property
    def extra(self) -> int:
        """Axes that it has more than its role."""
        return len(self.shape) - len(self.role.dims)


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What a file holds.

    Attributes
    ----------
    found : tuple of Found
    numbers : dict of str to int, float or bool
        Numbers beside the arrays, by their keys.
    vectors : dict of str to list
        One number for each run, by their keys.
    left_out : tuple of Taken
    guessed : tuple of str
        Keys of arrays that are W by their shape alone.
    """

    found: tuple[Found, ...]
    numbers: dict[str, Any]
    vectors: dict[str, list[Any]]
    left_out: tuple[Taken, ...]
    guessed: tuple[str, ...] = ()

    def of(self, role: str) -> tuple[Found, ...]:
        """Arrays of a role."""
        return tuple(each for each in self.found if each.role.name == role)


def recognise(
    file: ArrayFile, mapped: Mapping[str, str] | None = None, *, ignored: tuple[str, ...] = ()
) -> Recognised:
    """Find out what the arrays of a file are.

    Parameters
    ----------
    file : ArrayFile
    mapped : mapping of str to str, optional
        Keys, and the roles that they are to have.
    ignored : tuple of str, optional
        Keys that are left out.

    Raises
    ------
    FormatError
        If a name fits no array of such a type or rank, two names fit one role, or the only array
        that could be W has no name that says it, beside others that have names.
    InvalidArgument
        If a role or a key does not exist.
    """
    mapped = dict(mapped or {})
    _check_map(file, mapped, ignored)
    _check_attributes(file, ignored)
    taken = {ROLES[role].name for role in mapped.values() if role in ROLES}
    found: list[Found] = []
    left = _passed_over(file, ignored)
    numbers = numbers_beside(file, ignored)
    vectors = vectors_beside(file, ignored)
    unknown: list[Found] = []
    alone: list[Found] = []
    for key in file.keys:
        shape, dtype = file.shape(key), file.dtype(key)
        line = Taken(name=key, dtype=dtype, shape=shape, role="")
        if key in ignored:
            left.append(replace(line, why="as you said"))
            continue
        name = named(key)
        if key not in mapped and shape and key.lower() in AMBIGUOUS:
            roles = AMBIGUOUS[key.lower()]
            raise FormatError(
                f"{file.path}: {key} may be {' or '.join(roles)}; say which with "
                f"{' or '.join(f'--map {role}={key}' for role in roles)}"
            )
        if key in mapped:
            role = mapped[key]
            if role not in ROLES:
                continue  # a scalar, which is among the numbers
            name = replace(name, role=ROLES[role])
        elif name.role is not None and name.role.name in taken and name.role.is_variable:
            left.append(replace(line, why=f"{_mapped_to(mapped, name.role)} was named as that"))
            continue
        if name.role is not None and name.role.name == "token_ids":
            name = _described(file, key, name)
        if not shape:
            if name.role is not None and not is_number(dtype):
                raise _unfit(file, _found(key, dtype, shape, name), is_said=key in mapped)
            if name.role is not None and name.role.is_variable and dtype in NATIVE_TYPES:
                alone.append(_found(key, dtype, shape, name))
            elif key not in numbers:
                left.append(replace(line, why="no number"))
        elif name.role is not None:
            per_run = scalar_of(key) is not None and len(shape) == 1 and name.role.name == "lr"
            if per_run:
                vectors[key] = values_of(file, key).tolist()
            one = _found(key, dtype, shape, name)
            if "." in key and not _fits(one):  # one of the many arrays of a checkpoint
                left.append(replace(line, why="of another parameter"))
                continue
            if not _fits(one):
                raise _unfit(file, one, is_said=key in mapped)
            found.append(one)
        elif key in numbers or f"{key}[0]" in numbers:
            continue
        elif len(shape) == 1 and scalar_of(key) is not None:
            vectors[key] = values_of(file, key).tolist()
        elif is_derived(key):
            left.append(replace(line, why="follows from the rest"))
        elif (len(shape) == 3 and _is_float(dtype)) or (
            len(shape) == 2 and _is_float(dtype) and "." not in key
        ):
            unknown.append(_found(key, dtype, shape, replace(name, role=ROLES["W"])))
        else:
            left.append(replace(line, why="not known"))
    chosen, more = _by_shape_alone(file, found, unknown)
    found, dropped = _of_one_parameter(found + chosen)
    anchors = [one for one in found if one.role.name in TRAJECTORIES]
    for key in [key for key, values in vectors.items() if len(values) == 1]:
        # One rate for all rows, unless there is but one row.
        if any(len(one.shape) > 2 and one.shape[one.extra] > 1 for one in anchors):
            numbers[key] = number_of_one(file, key)
            del vectors[key]
            found = [one for one in found if one.key != key]
    if anchors and all(len(one.shape) == 2 for one in anchors):
        found += alone  # values of the one state that the file holds
    found, others = _once(file, found)
    return Recognised(
        found=tuple(found),
        numbers=numbers,
        vectors=vectors,
        left_out=(*left, *more, *dropped, *others),
        guessed=tuple(one.key for one in chosen),
    )


def _passed_over(file: ArrayFile, ignored: tuple[str, ...]) -> list[Taken]:
    """What the file holds besides, which its format does not offer."""
    return [
        Taken(name=key, dtype="", shape=(), role="", why="as you said" if key in ignored else why)
        for key, why in file.passed_over.items()
    ]


def _check_map(file: ArrayFile, mapped: Mapping[str, str], ignored: tuple[str, ...]) -> None:
    for key, role in mapped.items():
        if role not in ROLES and role not in SCALARS:
            raise InvalidArgument(
                f"there is no role {role!r}; choose from {', '.join((*ROLES, *SCALARS, IGNORE))}"
            )
        if key not in file.keys and key not in file.attributes:
            raise InvalidArgument(f"{file.path} holds no {key!r}; it holds {abridged(file.keys)}")
    for key in ignored:
        if key not in (*file.keys, *file.attributes, *file.passed_over):
            raise InvalidArgument(f"{file.path} holds no {key!r}; it holds {abridged(file.keys)}")


def _check_attributes(file: ArrayFile, ignored: tuple[str, ...]) -> None:
    """Whether no attribute tells of the tokens what only arrays are asked for."""
    for key, value in file.attributes.items():
        role = named(key).role
        is_list = isinstance(value, list) or (isinstance(value, str) and value[:1] in ("[", "("))
        if key not in ignored and is_list and role is not None and role.name in _LISTS:
            raise FormatError(
                f"{file.path}: {key} is an attribute, and {role.name} is read from arrays only; "
                f"save it as an array, or beside the file as {role.name}.npy for --masks with "
                f"--map {IGNORE}={key}"
            )


def _mapped_to(mapped: Mapping[str, str], role: Role) -> str:
    return next(key for key, name in mapped.items() if name == role.name)


def _found(key: str, dtype: str, shape: tuple[int, ...], name: Name) -> Found:
    assert name.role is not None
    return Found(
        key=key,
        dtype=dtype,
        shape=shape,
        role=name.role,
        run=name.run,
        matrix=name.matrix,
        population=name.population,
        is_described=name.is_described,
    )


def _described(file: ArrayFile, key: str, name: Name) -> Name:
    """Name of a list of tokens, of which a description says whether they are dead."""
    told = " ".join(str(value) for at, value in file.attributes.items() if "descr" in at.lower())
    population = described_population(told)
    if population is None:
        return name
    return replace(name, role=ROLES[f"{population}_ids"], is_described=True)


def _is_float(dtype: str) -> bool:
    return dtype in NATIVE_TYPES or dtype in _BITS


def _fits(one: Found) -> bool:
    """Whether the type and rank of an array fit its role."""
    role, rank = one.role, len(one.shape)
    if role.kind == "float":
        fits = one.dtype in NATIVE_TYPES or (one.dtype in _BITS and rank > 1)
    elif role.kind == "whole":
        fits = "int" in one.dtype
    else:
        fits = one.dtype == "bool" or "int" in one.dtype
    least = len(role.dims) - (1 if "step" in role.dims and len(role.dims) > 1 else 0)
    return fits and least <= rank <= len(role.dims) + 1


def _unfit(file: ArrayFile, one: Found, *, is_said: bool) -> FormatError:
    expected = {"float": "floating-point numbers or their 16 bits", "whole": "whole numbers",
                "truth": "truths"}[one.role.kind]  # fmt: skip
    told = f"{one.key} is of type {one.dtype} and shape {one.shape}"
    wanted = f"expected {expected} of ({', '.join(one.role.dims)})"
    if is_said:
        return FormatError(
            f"{file.path}: {told}, and was said to be {one.role.name}, {wanted}; the file holds "
            f"{abridged(file.keys)}"
        )
    return FormatError(
        f"{file.path}: {told}, and its name says {one.role.name}, {wanted}; say what it is with "
        f"--map ROLE={one.key}, or leave it out with --map {IGNORE}={one.key}"
    )


def _by_shape_alone(
    file: ArrayFile, found: list[Found], unknown: list[Found]
) -> tuple[list[Found], tuple[Taken, ...]]:
    """W, where no name says which array it is and one alone has its rank; the others."""
    anchors = [one for one in found if one.role.name in TRAJECTORIES]
    ranks = sorted({len(one.shape) for one in unknown}, reverse=True)
    for rank in ranks if not anchors else ():
        alike = [one for one in unknown if len(one.shape) == rank]
        runs = {one.run for one in alike}
        if len(alike) == len(runs):
            _check_alone(file, alike[0], found)
            rest = [one for one in unknown if one not in alike]
            return alike, tuple(_left(one, "not known") for one in rest)
        break
    return [], tuple(_left(one, "not known; say what it is with --map") for one in unknown)


def _check_alone(file: ArrayFile, one: Found, found: list[Found]) -> None:
    """Whether an array without a name that says it may be W: not beside others that have names."""
    beside = [other.key for other in found if other.role.is_variable]
    if beside:
        raise FormatError(
            f"{file.path} holds {abridged(beside)} and no W: {one.key} of shape {one.shape} could "
            f"be it, and its name does not say so; say it with --map W={one.key}"
        )


def _left(one: Found, why: str) -> Taken:
    return Taken(name=one.key, dtype=one.dtype, shape=one.shape, role="", why=why)


def _of_one_parameter(found: list[Found]) -> tuple[list[Found], list[Taken]]:
    """Of an optimizer's state, which has moments of every parameter, those of W."""
    shapes = {one.shape for one in found if one.role.name == "W"}
    kept, left = [], []
    for one in found:
        state = one.role.name in ("exp_avg", "exp_avg_sq", "grad") and "." in one.key
        alike = [other for other in found if other.role == one.role and other.shape == one.shape]
        if not state or (one.shape in shapes and len(alike) == 1):
            kept.append(one)
        elif one.shape in shapes:
            left.append(_left(one, "of several parameters of this shape; --map says which"))
        else:
            left.append(_left(one, "of another parameter"))
    return kept, left


def _once(file: ArrayFile, found: list[Found]) -> tuple[list[Found], list[Taken]]:
    """The arrays, if no two are the same variable; W that is tied in a model counts once."""
    left: list[Taken] = []
    matrices = {one.matrix for one in found if one.role.name == "W"}
    untied = "E" in matrices and len(matrices) > 1
    seen: dict[Any, Found] = {}
    for one in found:
        if not one.role.is_variable:
            continue
        place = (one.role.name, one.run, one.matrix if untied else None, one.population)
        other = seen.setdefault(place, one)
        if other is not one:
            raise FormatError(
                f"{file.path}: {other.key} and {one.key} both have names of {one.role.name}; say "
                f"which it is with --map {one.role.name}={one.key}"
            )
    if untied:
        same = tied(file, [one for one in found if one.role.name == "W"])
        if same is not None:
            left.append(_left(same, "the same values as the other matrix, which it is tied to"))
            found = [replace(one, matrix=None) for one in found if one is not same]
        else:
            # A W beside an E is the other matrix of an untied model.
            found = [
                replace(one, matrix="W")
                if one.matrix is None and one.role.name == "W" else one
                for one in found
            ]  # fmt: skip
    else:
        found = [replace(one, matrix=None) for one in found]
    return found, left


def abridged(keys: Any) -> str:
    """Keys for a message, a dozen at most."""
    names = sorted(map(str, keys))
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"
