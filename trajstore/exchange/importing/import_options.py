"""What the user of an import says, in place of what is recognised or beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.guessing.array_roles import IGNORE, abridged, recognise
from trajstore.exchange.guessing.role_table import named
from trajstore.exchange.importing.token_tables import TABLES, Told, told_tables
from trajstore.exchange.layouts import IMPORT_LAYOUTS
from trajstore.formats.array_file import ArrayFile, values_of
from trajstore.formats.open_file import open_file

__all__ = ["OTHERS", "Overrules", "overrules"]

_OF_THE_DEAD = "ids whose name says nothing, taken for those of the dead tokens"

OTHERS = "*"
"""Name of all variables that are not named."""


@dataclass(frozen=True, kw_only=True)
class Overrules:
    """What the user of an import says, in place of what is recognised or beside it.

    Attributes
    ----------
    layout : str, optional
        One of `trajstore.exchange.layouts.LAYOUTS`, whose keys and alignment the file has.
    mapped : dict of str to str
        Keys, and the roles that they have.
    ignored : tuple of str
        Keys that are left out.
    bits : dict of str to str
        What 16 bits are, bfloat16 or float16, by variables and keys; of all others under `OTHERS`.
    steps : str, optional
        Labels of the rows: a key, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
        Step of the first row, where nothing labels the rows.
    schedule : str, optional
        Of the learning rate.
    masks : tuple of Told
        Tables of tokens of another file.
    """

    layout: str | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bits: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    first_row: int | None = None
    schedule: str | None = None
    masks: tuple[Told, ...] = ()

    def bits_of(self, variable: str, *keys: str) -> str | None:
        """What the 16 bits of arrays of a variable are, if the user says it."""
        names = (*keys, variable, OTHERS)
        return next((self.bits[name] for name in names if name in self.bits), None)

    def names_bits(self, variable: str, *keys: str) -> bool:
        """Whether the user says it of this variable by its name."""
        return any(name in self.bits for name in (*keys, variable))


def overrules(
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
    schedule: str | None = None,
) -> Overrules:
    """What the user of an import says, checked as far as that needs no file but that of the masks.

    Parameters
    ----------
    layout : str, optional
    map : mapping of str to str or iterable of str, optional
        Name of the array that has each role, or several of a file with several runs; those of
        ``ignore`` are left out.
    bits : {'bfloat16', 'float16'} or mapping of str to them, optional
        Of all arrays, or by variables and names of arrays.
    labels : mapping of str to str, optional
        ``steps``: the name of an array, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
    masks : path-like, optional
    schedule : str, optional

    Raises
    ------
    InvalidArgument
        If one of them cannot be.
    RunNotFound, FormatError
        If `masks` is no file that tells tokens.
    """
    if layout is not None and layout not in IMPORT_LAYOUTS:
        raise InvalidArgument(
            f"there is no layout {layout!r}; choose from {', '.join(IMPORT_LAYOUTS)}"
        )
    bits_of = {} if bits is None else {OTHERS: bits} if isinstance(bits, str) else dict(bits)
    for type in bits_of.values():
        if type not in ("bfloat16", "float16"):
            raise InvalidArgument(f"16 bits are bfloat16 or float16, got {type!r}")
    if first_row not in (None, 0, 1):
        raise InvalidArgument(f"the first row is that of step 0 or 1, got {first_row!r}")
    unknown = set(labels or {}) - {"steps"}
    if unknown:
        raise InvalidArgument(f"labels are of steps, got {', '.join(sorted(unknown))}")
    mapped: dict[str, str] = {}
    ignored: list[str] = []
    for role, keys in (map or {}).items():
        for key in [keys] if isinstance(keys, str) else keys:
            if key in mapped:
                raise InvalidArgument(f"{key} cannot be both {mapped[key]} and {role}")
            if role == IGNORE:
                ignored.append(key)
            else:
                mapped[key] = role
    return Overrules(
        layout=layout,
        mapped=mapped,
        ignored=tuple(ignored),
        bits=bits_of,
        steps=(labels or {}).get("steps"),
        first_row=first_row,
        schedule=schedule,
        masks=() if masks is None else tuple(_tables_of(masks)),
    )


def _tables_of(masks: str | os.PathLike[str]) -> list[Told]:
    """Tables of tokens that another file tells."""
    with open_file(masks) as file:
        nameless = _nameless_ids(file)
        recognised = recognise(file, nameless)
        told = told_tables(file, recognised, of=f" of {Path(masks).name}")
        if not told:
            raise FormatError(
                f"{masks} tells no tokens: it holds {abridged(file.keys)}, expected masks or lists "
                "of ids (dead_mask, untrained_mask, live_ids, trained_indices, token_counts, …)"
            )
    note = ", ".join(nameless) + f" of {Path(masks).name}: {_OF_THE_DEAD}" if nameless else ""
    return [
        replace(one, is_beside=True, note=note if one.role == "dead_ids" else "")
        for one in told
        if one.role in TABLES
    ]


def _nameless_ids(file: ArrayFile) -> dict[str, str]:
    """The role of a `.npy` of distinct ids whose name says nothing: they are those of the dead."""
    if file.format != "npy":
        return {}
    (key,) = file.keys
    role = named(key).role
    is_told = role is not None and role.name in TABLES
    if is_told or "int" not in file.dtype(key) or len(file.shape(key)) != 1:
        return {}
    ids = values_of(file, key)
    return {key: "dead_ids"} if len(np.unique(ids)) == len(ids) else {}
