"""Populations: named sets of tokens, as masks along ``token``.

Dead, live and all tokens come with a run; users define others by masks, ids, labels, files or
expressions over coordinates. Expressions are never executed:

    token_count < quantile(token_count, 0.25) and not is_dead
    category(token_text) in ("Lu", "Ll") or token in (3, 14)

The syntax is a subset of Python: comparisons, ``and``, ``or``, ``not``, ``in``, numbers, texts and
lists of them. Names are coordinates along token, or populations. ``quantile(x, q)`` is over the
tokens of the Dataset. ``category(x)`` is the Unicode general category that all characters of a text
share, ignoring leading and trailing spaces, or ``mixed``. ``major(x)`` is its first letter, such as
``L`` for letters.

The rows of a parameter take the place of tokens (`row_vectors`), also in results and errors.
"""

from __future__ import annotations

import ast
import operator
import re
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajstore.arguments import ANY, exact
from trajstore.errors import FormatError, InvalidArgument, VariableNotRecorded, did_you_mean
from trajstore.installation import imported
from trajstore.provenance import RunAttributes
from trajstore.schema import POPULATION_FILES

if TYPE_CHECKING:
    import xarray as xr  # takes long

Array = npt.NDArray[Any]

POPULATIONS = ("dead", "live", "all")


def check_dataset(given: object) -> None:
    """Check that the argument is a Dataset with tokens.

    Raises
    ------
    InvalidArgument
        If it is anything else, such as the path of a run, or holds no token.
    """
    if not isinstance(given, imported("xarray", "Dataset")):
        raise InvalidArgument(
            f"got {type(given).__name__}, expected a Dataset of a run; open one with "
            "trajstore.open_run"
        )
    if given.sizes.get("token") == 0:
        raise InvalidArgument(
            "got a Dataset without tokens, expected at least one; select tokens that the run holds "
            "(it may have no dead or no live tokens)"
        )


def members(da: xr.DataArray | xr.Dataset) -> npt.NDArray[np.bool_]:
    """Members of the populations dead, live and all.

    Returns
    -------
    ndarray of bool, (population, token)
        In the order of `POPULATIONS`.

    Raises
    ------
    VariableNotRecorded
        If the run has no ``is_dead``.
    """
    if "is_dead" not in da.coords:
        raise VariableNotRecorded(
            "comparing dead with live tokens requires the coordinate is_dead along token, which is "
            "missing; assign it"
        )
    dead = np.asarray(da.coords["is_dead"].values, bool)
    return np.stack([dead, ~dead, np.ones_like(dead)])


def populations(
    da: xr.DataArray | xr.Dataset,
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names of the populations and their members, (population, token).

    Without ``is_dead``, the only one of the `POPULATIONS` is ``all``. Every other boolean
    coordinate along token, such as ``is_mostly_dead``, is a further population, named without
    ``is_``. Populations may overlap.
    """
    if "is_dead" in da.coords:
        names, groups = list(POPULATIONS), members(da)
    else:
        names, groups = ["all"], np.ones((1, da.sizes["token"]), bool)
    for name, mask in own_masks(da).items():
        names.append(name)
        groups = np.concatenate([groups, mask[None]])
    return names, groups


def own_masks(da: xr.DataArray | xr.Dataset) -> dict[str, npt.NDArray[np.bool_]]:
    """Populations other than `POPULATIONS`, by name.

    Raises
    ------
    InvalidArgument
        If two populations have the same name.
    """
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    for key, coordinate in da.coords.items():
        if key == "is_dead" or coordinate.dims != ("token",) or coordinate.dtype != bool:
            continue
        name = str(key).removeprefix("is_")
        if name in masks or name in POPULATIONS:
            raise InvalidArgument(
                f"the coordinate {key!r} defines a second population {name!r}; rename it"
            )
        masks[name] = np.asarray(coordinate.values)
    return masks


def chosen_populations(
    ds: xr.DataArray | xr.Dataset, population: str | Sequence[str] | None
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names and members of one, several or all populations.

    Raises
    ------
    InvalidArgument
        If a name is unknown.
    """
    names, groups = populations(ds)
    if population is None:
        return names, groups
    chosen = [population] if isinstance(population, str) else list(population)
    for name in chosen:
        if name not in names:
            known = dict.fromkeys((*POPULATIONS, *names))
            meant = "" if name in known else did_you_mean(name, known)
            raise InvalidArgument(
                f"got population={name!r}, expected {', '.join(known)}{meant}"
                + ("" if "dead" in names else "; the coordinate is_dead is missing")
            )
    return chosen, groups[[names.index(name) for name in chosen]]


def one_population(ds: xr.Dataset, population: str | None) -> npt.NDArray[np.bool_]:
    """Members of one population.

    Raises
    ------
    InvalidArgument
        If the name is unknown, or `population` does not select exactly one.
    """
    names, groups = chosen_populations(ds, population)
    if len(names) != 1:
        raise InvalidArgument(f"got population={population!r}, expected one of {', '.join(names)}")
    (group,) = groups
    return np.asarray(group)


T = TypeVar("T", bound="xr.DataArray | xr.Dataset")

_NAMES = {"token": "row", "hidden": "column", "tokens": "rows"}


def row_vectors(ds: xr.Dataset) -> xr.Dataset:
    """Rename the dimensions of a parameter to those of a run; return other Datasets unchanged.

    Parameters
    ----------
    ds : Dataset
        A run, or one parameter from ``ds.traj.parameter``, of dims (step, row, column).

    Returns
    -------
    Dataset
        Of dims (step, token, hidden). ``token`` is the number of the row. The attribute
        ``parameter`` is the name of the parameter.

    Raises
    ------
    InvalidArgument
        If the parameter has no elements.
    """
    if not {"row", "column"} <= set(ds.dims) or {"token", "hidden"} & set(ds.dims):
        return ds
    name = RunAttributes.of(ds.attrs).parameter or "W"
    if not ds.sizes["row"] * ds.sizes["column"]:
        raise InvalidArgument(f"the parameter {name} has no elements; choose another one")
    renamed = ds.rename(row="token", column="hidden")
    renamed.encoding = dict(ds.encoding)
    return renamed.assign_attrs(parameter=name)


def is_of_parameter(ds: xr.Dataset) -> bool:
    """True for the result of `row_vectors` if the vectors are rows of a parameter."""
    return "parameter" in ds.attrs


def row_words(text: str) -> str:
    """A text about tokens, as one about the rows of a parameter.

    >>> row_words("tokens of token_text, one token")
    'parameter rows of token_text, one parameter row'
    """
    rows = re.sub(r"\btoken(s?)\b(?!=)", r"parameter row\1", text)
    return re.sub(r"\bToken(s?)\b", r"Parameter row\1", rows)


def named_as_rows(result: T, ds: xr.Dataset) -> T:
    """Name tokens in a result of a parameter as rows, and hidden as column; others are returned.

    Parameters
    ----------
    result : DataArray or Dataset
    ds : Dataset
        What it was computed from, after `row_vectors`.
    """
    if not is_of_parameter(ds):
        return result
    known = {*result.dims, *result.coords, *getattr(result, "data_vars", ())}
    renamed: Any = result.rename({old: new for old, new in _NAMES.items() if old in known})
    for part in (renamed, *(renamed[name] for name in getattr(renamed, "data_vars", ()))):
        if "long_name" in part.attrs:
            part.attrs = {**part.attrs, "long_name": row_words(part.attrs["long_name"])}
    return cast(T, renamed)


@contextmanager
def errors_about_rows(ds: xr.Dataset) -> Iterator[None]:
    """Name tokens as rows in the errors of a computation from a parameter."""
    try:
        yield
    except (InvalidArgument, VariableNotRecorded) as error:
        if is_of_parameter(ds):
            raise type(error)(row_words(str(error))) from error
        raise


def populations_from(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse populations of the command line for `analysis.with_populations`.

    Parameters
    ----------
    assignments : sequence of str
        ``NAME=EXPRESSION`` or ``NAME=FILE``. A file holds one array, a mask or ids, in any
        supported format; or it is a ``.txt`` with one id per line, where ``#`` starts a comment.

    Returns
    -------
    dict of str to str or ndarray

    Raises
    ------
    InvalidArgument
        If a name is missing or occurs twice.
    FormatError
        If a file does not hold exactly one such array.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip() or name.strip() in result:
            raise InvalidArgument(
                f"got the population {assignment!r}, expected NAME=EXPRESSION or NAME=FILE, "
                "with unique names"
            )
        text = text.strip()
        if not Path(text).is_file() and Path(text).suffix in POPULATION_FILES:
            raise InvalidArgument(f"there is no file {text} for the population {name.strip()}")
        result[name.strip()] = _from_file(text) if Path(text).is_file() else text
    return result


def _from_file(path: str) -> Array:
    from trajstore.formats.array_file import values_of
    from trajstore.formats.open_file import open_file

    if Path(path).suffix == ".txt":
        try:
            lines = [line.partition("#")[0] for line in Path(path).read_text("utf-8").splitlines()]
            return np.array([int(line) for line in lines if line.strip()], np.int64)
        except ValueError as error:
            raise FormatError(f"{path}: expected one whole number per line") from error
    with open_file(path) as file:
        keys = list(file.keys)
        values = values_of(file, keys[0]) if len(keys) == 1 else None
    if values is None or values.ndim != 1 or values.dtype.kind not in "biu":
        what = "" if values is None else f" of shape {values.shape} and type {values.dtype}"
        raise FormatError(
            f"{path} holds {', '.join(keys) or 'nothing'}{what}, expected one array of one "
            "dimension with booleans or token ids"
        )
    return np.asarray(values)


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _category(text: str, letters: int) -> str:
    # A text that consists only of spaces has the category of a space.
    categories = {
        unicodedata.category(character)[:letters] for character in text.strip(" ") or text
    }
    return categories.pop() if len(categories) == 1 else "mixed"


class _Expression:
    """One expression over the tokens of a Dataset.

    Parameters
    ----------
    ds : Dataset
    text : str
    """

    def __init__(self, ds: xr.Dataset, text: str) -> None:
        self.ds, self.text = ds, text
        names, groups = populations(ds)
        self._populations = dict(zip(names, groups, strict=True))

    def tokens(self) -> npt.NDArray[np.bool_]:
        """True for each selected token."""
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise InvalidArgument(
                f"got the population {self.text!r}, expected an expression such as "
                "'token_count < quantile(token_count, 0.25)', or an existing file"
            ) from error
        return self._truth(tree.body)

    def _refuse(self, node: ast.AST, expected: str, known: Iterable[str] = ()) -> InvalidArgument:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return InvalidArgument(
            f"got {part!r}{did_you_mean(part, known)} in the population {self.text!r}, expected "
            f"{expected}"
        )

    def _truth(self, node: ast.expr) -> npt.NDArray[np.bool_]:
        """The mask of an expression, bool (token)."""
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return np.asarray(join.reduce([self._truth(operand) for operand in node.values]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._truth(node.operand)
        if isinstance(node, ast.Compare):
            return self._compared(node)
        mask = self._value(node)
        if not isinstance(mask, np.ndarray) or mask.dtype != bool:
            raise self._refuse(node, "a condition on each token")
        return mask

    def _compared(self, node: ast.Compare) -> npt.NDArray[np.bool_]:
        result = np.ones(self.ds.sizes["token"], bool)
        left = self._value(node.left)
        per_token = isinstance(left, np.ndarray)
        for comparison, right_node in zip(node.ops, node.comparators, strict=True):
            if isinstance(comparison, ast.In | ast.NotIn):
                members = self._members(left, right_node)
                result &= members if isinstance(comparison, ast.In) else ~members
                continue
            if type(comparison) not in _COMPARISONS:
                raise self._refuse(node, "one of == != < <= > >= in, not in")
            right = self._value(right_node)
            if _is_text(left) != _is_text(right):
                raise self._refuse(node, "two numbers or two texts")
            result &= np.asarray(_COMPARISONS[type(comparison)](_exact(left), _exact(right)), bool)
            per_token |= isinstance(right, np.ndarray)
            left = right
        if not per_token:
            raise self._refuse(node, "a coordinate along token in the comparison")
        return result

    def _members(self, left: Any, node: ast.expr) -> npt.NDArray[np.bool_]:
        if not isinstance(node, ast.Tuple | ast.List) or not isinstance(left, np.ndarray):
            example = 'token_text in ("a", "e")' if _is_text(left) else "token in (1, 2)"
            raise self._refuse(node, f"a coordinate in a list of values, such as {example}")
        wanted = [self._value(element) for element in node.elts]
        if any(
            isinstance(element, np.ndarray) or _is_text(element) != _is_text(left)
            for element in wanted
        ):
            raise self._refuse(node, "values of the same type as the coordinate")
        result = np.zeros(left.shape, bool)
        for element in wanted:
            result |= np.asarray(left == _exact(element), bool)
        return result

    def _value(self, node: ast.expr) -> Any:
        """A number, a text, or an array of either along token."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand)
            if _is_text(value) or np.asarray(value).dtype == bool:
                raise self._refuse(node, "a number after the minus")
            return -value
        if isinstance(node, ast.Name):
            return self._coordinate(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._called(node, node.func.id)
        raise self._refuse(
            node, "comparisons of coordinates, numbers and texts, with and, or, not, in"
        )

    def _coordinate(self, node: ast.Name) -> Array:
        known = {
            str(name): coordinate
            for name, coordinate in self.ds.coords.items()
            if coordinate.dims == ("token",)
        }
        if node.id in known:
            values = np.asarray(known[node.id].values)
            return values if values.dtype.kind in "biuf" else values.astype(object)
        if node.id in self._populations:
            return np.asarray(self._populations[node.id])
        expected = dict.fromkeys((*known, *self._populations))
        raise self._refuse(node, f"one of {', '.join(expected)}", expected)

    def _called(self, node: ast.Call, name: str) -> Any:
        values = [self._value(argument) for argument in node.args]
        if name == "quantile" and len(values) == 2:
            of, level = values
            if (
                not isinstance(of, np.ndarray)
                or of.dtype.kind not in "iuf"
                or isinstance(level, np.ndarray | str)
                or not 0 <= level <= 1
            ):
                raise self._refuse(node, "quantile(numbers of the tokens, q from 0 to 1)")
            return float(np.quantile(of, level)) if of.size else np.nan
        if name in ("category", "major") and len(values) == 1:
            if not isinstance(values[0], np.ndarray) or not _is_text(values[0]):
                raise self._refuse(node, f"{name}(texts of the tokens)")
            letters = 2 if name == "category" else 1
            return np.array([_category(text, letters) for text in values[0]], object)
        raise self._refuse(node, "quantile(x, q), category(x) or major(x)")


def _exact(value: Any) -> Any:
    """The value for a comparison. NumPy strips trailing NUL characters of its own texts."""
    return np.array(value, object) if isinstance(value, str) else value


def _is_text(value: Any) -> bool:
    return value.dtype == object if isinstance(value, np.ndarray) else isinstance(value, str)


def select_tokens(ds: xr.Dataset, expression: str) -> npt.NDArray[np.bool_]:
    """Tokens for which an expression over their coordinates holds.

    Parameters
    ----------
    ds : Dataset
        With the coordinates in the expression.
    expression : str
        See the module docstring for the syntax.

    Returns
    -------
    ndarray of bool, (token,)

    Raises
    ------
    InvalidArgument
        If the expression is invalid or contains an unknown name.
    """
    return _Expression(ds, expression).tokens()


def with_populations(
    ds: xr.Dataset, /, populations: Mapping[str, Any] | None = None, **named: Any
) -> xr.Dataset:
    """Add populations to a Dataset. Every analysis then accepts and reports them.

    Each population becomes a coordinate ``is_NAME`` along token. Any other boolean coordinate along
    token is also a population, under its own name. Populations may overlap.

    Parameters
    ----------
    ds : Dataset
        A run, or one parameter from ``ds.traj.parameter``, whose rows are then tokens.
    populations : mapping, optional
        Populations by name. A value is one of: a mask, bool (token); token ids, whole numbers as in
        ``token`` (also a set); labels, one text per token, where each label except the empty one
        becomes a population NAME_LABEL; an expression, a str such as
        ``token_count < quantile(token_count, 0.25)`` (docs/reference/variables.md). Of a parameter,
        the number of a row is ``row``.
    **named
        Further populations.

    Returns
    -------
    Dataset

    Raises
    ------
    InvalidArgument
        If a name exists or is invalid, an expression is invalid, a mask or labels do not have one
        value per token, a token id is unknown, or a value is a file name.

    Examples
    --------
    >>> some = with_populations(ds, rare="0 < token_count <= 1", first=[0, 1, 2])
    >>> from trajstore.analysis import centroid
    >>> centroid(some).population.values.tolist()
    ['dead', 'live', 'all', 'rare', 'first']
    >>> int(some.is_rare.sum())
    5
    """
    check_dataset(ds)
    ds = row_vectors(ds)
    if not isinstance(populations, Mapping | None):
        raise InvalidArgument(
            f"got {populations!r}, expected a mapping from names to populations, or keywords "
            "such as rare='token_count < 10'"
        )
    for name, given in {**(populations or {}), **named}.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"got the population name {name!r}, expected a str")
        for title, mask in _masks(ds, name, given).items():
            if not title.isidentifier() or title in (*POPULATIONS, "mostly_dead"):
                raise InvalidArgument(
                    f"got the population name {title!r}, expected letters, digits and _, no "
                    f"leading digit, and none of {', '.join(POPULATIONS)}, mostly_dead"
                )
            if f"is_{title}" in ds.coords or title in ds.coords:
                raise InvalidArgument(
                    f"a coordinate {title!r} or 'is_{title}' already exists; choose another name"
                )
            ds = ds.assign_coords({f"is_{title}": ("token", mask)})
    return ds


def _masks(ds: xr.Dataset, name: str, given: Any) -> dict[str, npt.NDArray[np.bool_]]:
    is_text = isinstance(given, str)
    if isinstance(given, PurePath) or (is_text and PurePath(given).suffix in POPULATION_FILES):
        raise InvalidArgument(
            f"got the file name {given} for the population {name}, expected ids or a mask; only "
            f"the command line reads files: --population {name}={given}"
        )
    if is_text:
        rows = {"row": ds["token"]} if is_of_parameter(ds) else {}
        return {name: select_tokens(ds.assign_coords(rows), given)}
    values = _values(name, given)
    tokens = ds.sizes["token"]
    if values.dtype.kind in "iu" or not values.size:
        return {name: _of_ids(ds, name, exact(f"population {name}", values, "int64", least=ANY))}
    if values.dtype.kind == "f" or len(values) != tokens:
        raise InvalidArgument(
            f"got {len(values)} values of {values.dtype} for the population {name}, expected a "
            f"boolean or a label for each of {tokens} tokens, or ids"
        )
    if values.dtype == bool:
        return {name: values}
    texts = exact(f"population {name}", values, "string").astype(object)
    labels = [label for label in dict.fromkeys(texts.tolist()) if label]
    return {f"{name}_{label}": np.asarray(texts == label, bool) for label in sorted(labels)}


def _values(name: str, given: Any) -> Array:
    """The given values as a one-dimensional array."""
    try:
        listed = isinstance(given, list | tuple | Set)
        values = np.asarray([*given] if listed else given)
        if listed and (values.dtype.kind == "U" or any(isinstance(item, bool) for item in given)):
            # NumPy turns 1 next to texts into "1", and True next to numbers into 1.
            values = values if values.dtype == bool else np.asarray([*given], object)
    except ValueError:  # lists of several lengths
        values = np.empty((0, 0))
    if values.ndim != 1:
        shape = f" of shape {values.shape}" if values.size > 1 else ""
        raise InvalidArgument(
            f"got {reprlib.repr(given)}{shape} for the population {name}, expected an expression "
            "or one dimension: a mask, ids, or one label per token"
        )
    return values


def _of_ids(ds: xr.Dataset, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    known = ds["token"].values
    unknown = np.setdiff1d(ids, known)
    if unknown.size:
        raise InvalidArgument(
            f"got {unknown.size} unknown token ids for the population {name}, the first is "
            f"{unknown[0]}; give ids of the run"
        )
    return np.asarray(np.isin(known, ids))
