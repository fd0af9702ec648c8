"""Exact conversion of values that a caller passes: they are stored as they are, or refused."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument

Array = npt.NDArray[Any]

ANY, _LARGEST = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_DEEPEST = 100  # as `trajstore.strict_json.parse`


def exact(name: str, values: Any, dtype: str, *, least: int = 0) -> Array:
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
    expected = _expected(dtype, least)
    if given is None or given.ndim != 1:
        got = reprlib.repr(values) if given is None else f"an array of shape {given.shape}"
        raise InvalidArgument(f"{name}: got {got}, expected one dimension of {expected}")
    wrong = _wrong(given, dtype, least)
    if wrong is not None:
        found = given[wrong]
        value = "a masked value" if found is np.ma.masked else reprlib.repr(_plain(found))
        raise InvalidArgument(f"{name}: got {value} at position {wrong}, expected {expected}")
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
        for key, one in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"{name}: got the key {key!r}, expected strings as keys")
            exact_json(f"{name}.{key}", one, depth=depth + 1)
    elif isinstance(value, list):
        for at, one in enumerate(value):
            exact_json(f"{name}[{at}]", one, depth=depth + 1)
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


def _expected(dtype: str, least: int) -> str:
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
        wrong = np.array([not fits[type(one)] for one in given.tolist()], bool)
        if not wrong.any() and dtype == "string":
            wrong = np.array([not _is_unicode(one) for one in given.tolist()], bool)
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
