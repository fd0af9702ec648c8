"""JSON read strictly, and compared."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Document", "differences", "parse", "same"]

Document = dict[str, Any]


def parse(text: str) -> Any:
    """Value of a JSON text that has no name twice, and no NaN or infinity.

    Raises
    ------
    ValueError
        If it is none, or nested so deeply that it cannot be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _distinct(pairs: list[tuple[str, Any]]) -> Document:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; 1, 1.0 and true are three values."""
    return bool(json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Places in which two JSON values differ, such as ``codecs.0.name``."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted(one.keys() | other.keys())
            for line in (
                differences(one[key], other[key], f"{at}.{key}" if at else key)
                if key in one and key in other
                else [f"{at}.{key}" if at else key]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for number, pair in enumerate(zip(one, other, strict=True))
            for line in differences(*pair, f"{at}.{number}")
        ]
    return [] if same(one, other) else [at]
