"""Options of an import: what its user decides, in place of what is detected or beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trajstore.errors import InvalidArgument
from trajstore.exchange.guessing.detect_arrays import IGNORE
from trajstore.exchange.importing.token_masks import masks_of
from trajstore.exchange.importing.token_tables import TokenArray
from trajstore.exchange.layouts import IMPORT_LAYOUTS

__all__ = ["OTHERS", "ImportOptions", "import_options"]

OTHERS = "*"
"""Name of all variables that are not named."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import: what its user decides, in place of what is detected or beside it.

    Attributes
    ----------
    layout : str, optional
        One of `trajstore.exchange.layouts.LAYOUTS`, whose keys and alignment the file has.
    mapped : dict of str to str
        Keys, and the kinds that they have.
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
    masks : tuple of TokenArray
        Tables of tokens of another file.
    """

    layout: str | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bits: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    first_row: int | None = None
    schedule: str | None = None
    masks: tuple[TokenArray, ...] = ()

    def bits_of(self, variable: str, *keys: str) -> str | None:
        """What the 16 bits of arrays of a variable are, if the user says it."""
        names = (*keys, variable, OTHERS)
        return next((self.bits[name] for name in names if name in self.bits), None)

    def names_bits(self, variable: str, *keys: str) -> bool:
        """Whether the user says it of this variable by its name."""
        return any(name in self.bits for name in (*keys, variable))


def import_options(
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
    schedule: str | None = None,
) -> ImportOptions:
    """Options of an import, checked as far as that needs no file but the one of the masks.

    Parameters
    ----------
    layout : str, optional
    map : mapping of str to str or iterable of str, optional
        Name of the array that has each kind, or several of a file with several runs; those of
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
    for kind, keys in (map or {}).items():
        for key in [keys] if isinstance(keys, str) else keys:
            if key in mapped:
                raise InvalidArgument(f"{key} cannot be both {mapped[key]} and {kind}")
            if kind == IGNORE:
                ignored.append(key)
            else:
                mapped[key] = kind
    return ImportOptions(
        layout=layout,
        mapped=mapped,
        ignored=tuple(ignored),
        bits=bits_of,
        steps=(labels or {}).get("steps"),
        first_row=first_row,
        schedule=schedule,
        masks=() if masks is None else masks_of(masks),
    )
