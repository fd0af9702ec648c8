"""Checks of arguments of public functions.

`checks_types` compares them with the types in the signature. `exact`, `exact_step` and `exact_json`
convert values that are stored: they are kept as they are, or refused.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, did_you_mean

Array = npt.NDArray[Any]
ANY, _LARGEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_DEEPEST = 100  # as `trajstore.strict_json.parse`

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Bound:
    """Least value of a number, for ``Annotated``."""

    words: Literal["of at least", "above"]
    limit: float

    def holds(self, value: Any) -> bool:
        """True for a number within the bound."""
        return bool(value > self.limit or (self.words == "of at least" and value == self.limit))

    def __str__(self) -> str:
        return f"{self.words} {self.limit}"


@dataclass(frozen=True)
class Example:
    """A value that an error shows, for ``Annotated``."""

    value: Any

    def holds(self, value: Any) -> bool:
        """True: an example restricts nothing."""
        return True

    def __str__(self) -> str:
        return f"such as {self.value!r}"


Count = Annotated[int, Bound("of at least", 1)]
Positive = Annotated[float, Bound("above", 0)]

# Kinds of NumPy dtypes that are accepted for each Python number.
_KINDS: dict[Any, str] = {bool: "b", int: "iu", float: "iuf"}
_IN_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def checks_types(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to refuse arguments that differ from the types in its signature.

    NumPy's numbers count as numbers, and 1-D arrays as sequences. A whole float is passed on as an
    int where one is expected. Booleans do not count as numbers, nor a string as a sequence of
    strings. A ``Literal`` accepts its values only; an ``Annotated`` number with a `Bound` has to be
    within it. The function itself checks other values, and types that are not plain classes, such
    as ``numpy.typing.ArrayLike``.

    Raises
    ------
    InvalidArgument
        The decorated function raises it with the received value and the expected type.

    Examples
    --------
    >>> @checks_types
    ... def every(k: int | None = None) -> None: ...
    >>> every(k=1.5)
    Traceback (most recent call last):
    trajstore.errors.InvalidArgument: got k=1.5, expected a whole number or None
    """
    signature = inspect.signature(function)
    hints = functools.cache(lambda: typing.get_type_hints(function, include_extras=True))

    @functools.wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError:  # Python's own message is clearer
            return function(*arguments, **keywords)
        for name, value in bound.arguments.items():
            variadic = signature.parameters[name].kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            )
            hint = hints().get(name, Any)
            if not variadic:
                bound.arguments[name] = _checked(name, value, hint)
        return function(*bound.args, **bound.kwargs)

    return checked


def check_fields(options: Any) -> None:
    """Raise an error for a field of a dataclass whose value differs from its type.

    Raises
    ------
    InvalidArgument
        As a function with `checks_types`.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = _checked(field.name, getattr(options, field.name), hints[field.name])
        object.__setattr__(options, field.name, value)  # it may be frozen


def _checked(name: str, value: Any, hint: Any) -> Any:
    if _fits(value, hint):
        return value
    if isinstance(value, float | np.floating) and value.is_integer() and _fits(int(value), hint):
        return int(value)
    near = did_you_mean(value, _words(hint)) if isinstance(value, str) else ""
    expected = " or ".join(_expected(hint))
    raise InvalidArgument(f"got {name}={_shown(value)}{near}, expected {expected}")


def _words(hint: Any) -> list[str]:
    """Strings that a type allows."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [part for part in parts if isinstance(part, str)]
    return [word for part in parts for word in _words(part)]


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return any(_fits(value, type(part)) and bool(value == part) for part in parts)
    if origin is Annotated:
        return _fits(value, parts[0]) and all(bound.holds(value) for bound in parts[1:])
    if hint in _KINDS:
        return not getattr(value, "shape", ()) and _kind(value) in _KINDS[hint]
    if hint is str and hasattr(value, "dtype"):  # a value of a coordinate, such as population
        return not value.shape and _dtype(value).kind in "OUT"
    if origin is not None and issubclass(origin, Sequence):
        return _is_sequence(value, *parts[:1])
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, origin) and all(
            _fits(key, parts[0]) and _fits(item, parts[1]) for key, item in value.items()
        )
    if hint is Any:
        return True
    plain = hint if origin is None else origin
    if not isinstance(plain, type) or getattr(plain, "_is_protocol", False):
        return True
    return isinstance(value, plain)


def _kind(value: Any) -> str:
    """Kind of the NumPy dtype of a number or an array; a space for other values."""
    if hasattr(value, "dtype"):
        return _dtype(value).kind
    named = ((bool, "b"), (numbers.Integral, "i"), (numbers.Real, "f"))
    return next((kind for number, kind in named if isinstance(value, number)), " ")


def _dtype(array: Any) -> np.dtype[Any]:
    """NumPy dtype of the elements. Lazy arrays are not computed."""
    dtype = array.dtype
    return dtype if isinstance(dtype, np.dtype) else np.asarray(array).dtype


def _is_sequence(value: Any, of: Any) -> bool:
    if hasattr(value, "dtype"):
        # A table has no NumPy dtype, and the dtype of an empty array means nothing.
        fits = 0 in value.shape or _dtype(value).kind in _KINDS.get(of, "OUT")
        return len(value.shape) == 1 and fits
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(_fits(item, of) for item in value)


def _expected(hint: Any) -> list[str]:
    """Expected types in words, one per alternative."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is types.NoneType:
        return ["None"]
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(word for part in parts for word in _expected(part)))
    if origin is typing.Literal:
        return [repr(part) for part in parts]
    if origin is Annotated:
        (kind,) = _expected(parts[0])
        return [f"{kind} {' and '.join(map(str, parts[1:]))}"]
    if origin is not None and issubclass(origin, Sequence):
        return [f"a list of {_IN_WORDS[part][1] if part in _IN_WORDS else part}" for part in parts]
    if hint in _IN_WORDS or origin is np.integer:
        return [_IN_WORDS[int if origin is np.integer else hint][0]]
    if origin is not None and issubclass(origin, Mapping):
        return [f"a mapping of {' to '.join(map(_plural, parts))}"]
    name = str(getattr(origin or hint, "__name__", hint))
    return [f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"]


def _plural(hint: Any) -> str:
    kind, *bounds = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    return " ".join([_IN_WORDS[kind][1] if kind in _IN_WORDS else "values", *map(str, bounds)])


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape:
        return f"{type(value).__name__} of shape {shape} and type {getattr(value, 'dtype', '')}"
    sizes = getattr(value, "sizes", None)
    if isinstance(sizes, Mapping):
        return type(value).__name__
    return reprlib.repr(value)


def exact(name: str, values: Any, dtype: str, *, least: int = 0, each: str = "") -> Array:
    """Convert values to one dimension of a stored type, or raise an error.

    Whole numbers have an integer type, no float or bool, also if its value is whole. Booleans can
    also be numbers that are 0 or 1. Texts are strings. Elements of lists are checked one by one,
    because NumPy would convert them to a common type.

    Parameters
    ----------
    name : str
        Name of the argument, for the message.
    values : array_like or iterable
        An array (also of torch, dask, xarray or pandas), or a list, set or range.
    dtype : {'bool', 'int32', 'int64', 'string'}
    least : int
        Least whole number; `ANY` for values that are looked up, where the search says what is
        missing.
    each : str
        What has one of the values, for the message.

    Raises
    ------
    InvalidArgument
        If a value would change. The message has it, its position, and the expected values.

    Examples
    --------
    >>> exact("token", [5, 7], "int32")
    array([5, 7], dtype=int32)
    >>> exact("is_dead", [0.3, 1], "bool")
    Traceback (most recent call last):
    trajstore.errors.InvalidArgument: is_dead: got 0.3 at position 0, expected True or False...
    """
    given = _array(values)
    expected = _expected_values(dtype, least) + (each and f", one for each of {each}")
    if given is None or given.ndim != 1:
        got = reprlib.repr(values) if given is None else f"an array of shape {given.shape}"
        raise InvalidArgument(f"{name}: got {got}, expected one dimension of {expected}")
    wrong = _wrong(given, dtype, least)
    if wrong is not None:
        element = given[wrong]
        value = "a masked value" if element is np.ma.masked else reprlib.repr(_plain(element))
        of = "" if given.dtype == object else f" of {len(given)} values of {given.dtype}"
        raise InvalidArgument(f"{name}: got {value} at position {wrong}{of}, expected {expected}")
    return np.asarray(given).astype(np.dtypes.StringDType() if dtype == "string" else dtype)


def exact_step(step: Any, *, least: int = 0) -> int:
    """Convert the number of a step to int, or raise an error.

    Raises
    ------
    InvalidArgument
        If it is not a whole number from `least` to 2^63 − 1.
    """
    if type(step) is int and least <= step <= _LARGEST:  # the usual one, in each row
        return step
    if getattr(step, "shape", None) == () and hasattr(step, "item"):  # NumPy's and torch's numbers
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, numbers.Integral):
        raise InvalidArgument(f"step: got {reprlib.repr(step)}, expected a whole number")
    number = int(step)
    if not least <= number <= _LARGEST:
        raise InvalidArgument(f"step: got {step}, expected a whole number from {least} to 2^63 - 1")
    return number


def exact_json(name: str, value: Any, *, depth: int = 0) -> None:
    """Raise an error unless JSON holds a value exactly.

    JSON has no tuples, NaN, infinities, values of NumPy, or keys other than strings: the value that
    is read would differ.

    Parameters
    ----------
    name : str
        Path of the value, for the message, such as ``config.optimizer.betas``.
    value : object
        None, a bool, number or string, or a list or dict of such values.

    Raises
    ------
    InvalidArgument
        If it does not. The message has the value and its path.

    Examples
    --------
    >>> exact_json("config", {"betas": (0.9, 0.99)})
    Traceback (most recent call last):
    trajstore.errors.InvalidArgument: config.betas: got (0.9, 0.99), expected a list
    """
    expected = ""
    if depth > _DEEPEST:
        raise InvalidArgument(
            f"{reprlib.repr(name)}: expected values that are nested at most {_DEEPEST} deep"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"{name}: got the key {key!r}, expected strings as keys")
            exact_json(f"{name}.{key}", item, depth=depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            exact_json(f"{name}[{index}]", item, depth=depth + 1)
    elif isinstance(value, float):
        expected = "" if math.isfinite(value) else "a finite number, None or a string"
    elif isinstance(value, tuple | set | frozenset):
        expected = "a list"
    elif isinstance(value, np.generic | np.ndarray) and not isinstance(value, str):
        expected = "a value of Python (item(), tolist())"
    elif value is not None and not isinstance(value, str | int):
        expected = "a JSON value: None, a bool, number or string, or a list or dict of them"
    if expected:
        raise InvalidArgument(f"{name}: got {reprlib.repr(value)}, expected {expected}")


def _array(values: Any) -> Array | None:
    """The values as an array, elements of other iterables as objects. None for anything else."""
    if hasattr(values, "detach"):  # a tensor of torch, which may be on a device
        values = values.detach().cpu()
    if hasattr(values, "dtype"):
        return values if np.ma.isMaskedArray(values) else np.asarray(values)
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return None
    elements = list(values)
    return np.fromiter(elements, object, len(elements))


def _expected_values(dtype: str, least: int) -> str:
    if dtype == "bool":
        return "True or False, or 1 and 0"
    if dtype == "string":
        return "strings of Unicode"
    return f"whole numbers from {least} to {np.iinfo(dtype).max}"


def _wrong(given: Array, dtype: str, least: int) -> int | None:
    """Position of the first value that the type does not hold exactly; None without one."""
    wrong: Any
    if given.dtype == object or dtype == "string":
        fits = {kind: _fits_type(kind, dtype) for kind in set(map(type, given.tolist()))}
        wrong = np.array([not fits[type(element)] for element in given.tolist()], bool)
        if not wrong.any() and dtype == "string":
            wrong = np.array([not _is_unicode(element) for element in given.tolist()], bool)
    elif given.dtype.kind not in ("biuf" if dtype == "bool" else "iu"):
        return 0 if len(given) else None
    else:
        wrong = np.zeros(len(given), bool)
    wrong = wrong | np.ma.getmaskarray(given)
    given = np.asarray(given)
    if not wrong.any() and dtype == "bool":
        wrong = (given != 0) & (given != 1)
    elif not wrong.any() and dtype != "string":
        wrong = (given < least) | (given > np.iinfo(dtype).max)
    return int(np.argmax(wrong)) if np.any(wrong) else None


def _fits_type(kind: type, dtype: str) -> bool:
    if dtype == "string":
        return issubclass(kind, str)
    is_bool = issubclass(kind, bool | np.bool_)
    if dtype == "bool":
        return is_bool or issubclass(kind, numbers.Real)
    return issubclass(kind, numbers.Integral) and not is_bool


def _is_unicode(text: str) -> bool:
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
