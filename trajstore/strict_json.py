"""Strict parsing and comparison of JSON; times for JSON."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

MISSING = object()
"""In place of a member that an object does not have."""

LARGEST_METADATA = 16 << 20
"""Bytes of a `zarr.json`."""

_DEEPEST = 100


def parse(text: str) -> Any:
    """Parse a JSON text. Repeated names, NaN and infinities are errors.

    Raises
    ------
    ValueError
        If the text is not such JSON, or is nested more than 100 deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    _check_depth(value)
    return value


def metadata_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read the bytes of a `zarr.json`, which has at most 16 MiB in a run.

    Raises
    ------
    ValueError
        If the path is not a regular file (a pipe, for example), or is larger than 16 MiB.
    OSError
        If it cannot be read.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("it is not a regular file")  # reading a pipe would block
    if status.st_size > LARGEST_METADATA:
        raise ValueError(too_large(status.st_size))
    return Path(path).read_bytes()


def too_large(size: int) -> str:
    """Message about a `zarr.json` of too many bytes."""
    return f"it has {size:,} bytes; metadata have at most {LARGEST_METADATA:,}"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _distinct(pairs: list[tuple[str, Any]]) -> JsonObject:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: docs/reference/format.md, *Canonical JSON*.

    Raises
    ------
    ValueError
        If a number is NaN or infinite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def same(value: Any, other: Any) -> bool:
    """True if two JSON values are the same. 1, 1.0 and true are three different values."""
    return bool(json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True))


def changes(value: Any, other: Any, place: str = "") -> list[tuple[str, Any, Any]]:
    """Places in which two JSON values differ, such as ``codecs.0.name``, with both values.

    A member that only one of them has is `MISSING` in the other.
    """
    if value is other:
        return []
    if isinstance(value, dict) and isinstance(other, dict):
        keys: list[Any] = sorted(value.keys() | other.keys())
        pairs = [(value.get(key, MISSING), other.get(key, MISSING)) for key in keys]
    elif isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        keys, pairs = [*range(len(value))], [*zip(value, other, strict=True)]
    else:
        equal = MISSING not in (value, other) and same(value, other)
        return [] if equal else [(place, value, other)]
    return [
        change
        for key, pair in zip(keys, pairs, strict=True)
        for change in changes(*pair, f"{place}.{key}" if place else str(key))
    ]


def fits(value: Any, form: Any) -> bool:
    """True if a JSON value has a form.

    Parameters
    ----------
    value : object
    form : object
        A type; a function of the value; ``[form]`` of each item of a list; or a form of each member
        of an object. A member whose name ends with ``?`` may be missing, and others may be there.

    Examples
    --------
    >>> fits({"step": 3, "more": None}, {"step": int, "config?": dict})
    True
    """
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            fits(value[key], wanted) if (key := name.rstrip("?")) in value else key != name
            for name, wanted in form.items()
        )
    if isinstance(form, type):
        return isinstance(value, form) and isinstance(value, bool) == (form is bool)
    return bool(form(value))


def utc_now() -> str:
    """ISO 8601 to the second, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
