"""Check of the arguments of public functions against the types in their signatures."""

from __future__ import annotations

import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import numpy as np

from trajstore.errors import InvalidArgument

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
    raise InvalidArgument(f"got {name}={_shown(value)}, expected {' or '.join(_expected(hint))}")


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
            _fits(key, parts[0]) and _fits(one, parts[1]) for key, one in value.items()
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
    own = array.dtype
    return own if isinstance(own, np.dtype) else np.asarray(array).dtype


def _is_sequence(value: Any, of: Any) -> bool:
    if hasattr(value, "dtype"):
        # A table has no NumPy dtype, and the dtype of an empty array means nothing.
        fits = 0 in value.shape or _dtype(value).kind in _KINDS.get(of, "OUT")
        return len(value.shape) == 1 and fits
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(_fits(one, of) for one in value)


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
