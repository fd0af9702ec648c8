"""Options of an import. They override or complete the usual names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trajstore.errors import InvalidArgument
from trajstore.exchange.importing.named_arrays import IGNORE
from trajstore.exchange.importing.token_masks import masks_of
from trajstore.exchange.importing.token_tables import TokenArray
from trajstore.exchange.layouts import IMPORT_LAYOUTS, Layout, layout_of

OTHERS = "*"
"""Key of all variables without an entry."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import. They override or complete the usual names.

    Attributes
    ----------
    layout : Layout, optional
        The keys and alignment of the file.
    mapped : dict of str to str
        Keys and their kinds.
    ignored : tuple of str
        Keys to omit.
    bits : dict of str to str
        Type of 16-bit values, bfloat16 or float16, by variable or key; `OTHERS` for the rest.
    steps : str, optional
        Labels of the rows: a key, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
        Step of the first row of a file without labels.
    masks : tuple of TokenArray
        Labels of tokens from another file.
    """

    layout: Layout | None = None
    mapped: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    bits: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    first_row: int | None = None
    masks: tuple[TokenArray, ...] = ()

    def bits_of(self, variable: str, *keys: str) -> str | None:
        """Type of the 16-bit arrays of a variable, if an option gives it."""
        names = (*keys, variable, OTHERS)
        return next((self.bits[name] for name in names if name in self.bits), None)


def import_options(
    *,
    layout: str | None = None,
    map: Mapping[str, str | Iterable[str]] | None = None,
    bits: str | Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    first_row: int | None = None,
    masks: str | os.PathLike[str] | None = None,
) -> ImportOptions:
    """Check the options of an import. Of all files, only ``masks`` is read.

    Parameters
    ----------
    layout : str, optional
    map : mapping of str to str or iterable of str, optional
        Name of the array of each kind, or several names in a file with several runs. Arrays under
        ``ignore`` are omitted.
    bits : {'bfloat16', 'float16'} or mapping of str to them, optional
        Type of all 16-bit arrays, or types by variable or name of an array.
    labels : mapping of str to str, optional
        ``steps``: the name of an array, or numbers such as ``0:2001:50``.
    first_row : {0, 1}, optional
    masks : path-like, optional

    Raises
    ------
    InvalidArgument
        If an option has an invalid value.
    RunNotFound, FormatError
        If `masks` does not exist, or labels no tokens.
    """
    described = None if layout is None else layout_of(layout, IMPORT_LAYOUTS)
    bits_of = {} if bits is None else {OTHERS: bits} if isinstance(bits, str) else dict(bits)
    for type in bits_of.values():
        if type not in ("bfloat16", "float16"):
            raise InvalidArgument(f"got bits {type!r}, expected bfloat16 or float16")
    if first_row not in (None, 0, 1):
        raise InvalidArgument(f"got first row {first_row!r}, expected step 0 or 1")
    unknown = set(labels or {}) - {"steps"}
    if unknown:
        raise InvalidArgument(f"got labels of {', '.join(sorted(unknown))}, expected steps only")
    mapped: dict[str, str] = {}
    ignored: list[str] = []
    for kind, keys in (map or {}).items():
        for key in [keys] if isinstance(keys, str) else keys:
            if key in mapped:
                raise InvalidArgument(
                    f"got {key} mapped to {mapped[key]} and to {kind}, expected one of them"
                )
            if kind == IGNORE:
                ignored.append(key)
            else:
                mapped[key] = kind
    return ImportOptions(
        layout=described,
        mapped=mapped,
        ignored=tuple(ignored),
        bits=bits_of,
        steps=(labels or {}).get("steps"),
        first_row=first_row,
        masks=() if masks is None else masks_of(masks),
    )
