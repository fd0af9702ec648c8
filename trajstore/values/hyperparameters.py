"""The numbers of an optimizer's parameter group, each under a name of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from numbers import Real
from typing import Any


def numbers_of(settings: Iterable[tuple[str, Any]], *, flags: bool = False) -> dict[str, float]:
    """Numbers among settings; those of a list get numbered names.

    Parameters
    ----------
    settings : iterable of (str, object)
        Names and values. Texts and other values are left out.
    flags : bool
        Keep flags, too.

    Examples
    --------
    >>> numbers_of({"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}.items())
    {'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08}
    """
    found: dict[str, float] = {}
    for key, value in settings:
        kind = type(value)
        if kind is tuple or kind is list:
            if all(isinstance(one, Real) for one in value):
                found.update(zip(_numbered(key, len(value)), value, strict=True))
        elif kind is float or (flags if kind is bool else isinstance(value, Real)):
            found[key] = value
    return found


def with_numbers(settings: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    """Settings with other numbers, as far as `numbers` has their names.

    >>> with_numbers({"betas": [0.9, 0.999], "eps": 1e-8}, {"beta1": 0.8, "momentum": 0.5})
    {'betas': (0.8, 0.999), 'eps': 1e-08}
    """
    found = dict(settings)
    for key, value in settings.items():
        if isinstance(value, tuple | list):
            names = _numbered(key, len(value))
            if any(name in numbers for name in names):
                pairs = zip(names, value, strict=True)
                found[key] = tuple(_like(old, numbers.get(name, old)) for name, old in pairs)
        elif key in numbers:
            found[key] = _like(value, numbers[key])
    return found


def _like(old: Any, new: float) -> Any:
    """A number, which stays an int: some classes count with it."""
    return int(new) if type(old) is int and float(new).is_integer() else new


@lru_cache
def _numbered(key: str, count: int) -> tuple[str, ...]:
    stem = key if key == "eps" else key.removesuffix("s")
    return tuple(f"{stem}{number}" for number in range(1, count + 1))
