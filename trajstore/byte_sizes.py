"""Sizes in bytes: what may be taken, and how people write and read them."""

from __future__ import annotations

from trajstore.errors import InvalidArgument

__all__ = ["DEFAULT_MEMORY", "EXCHANGE_MEMORY", "format_bytes", "parse_bytes"]

DEFAULT_MEMORY = 1 << 30
"""Bytes that a writer may take."""

EXCHANGE_MEMORY = "320MiB"
"""For the one block that an import or an export to Zarr holds: 8 rows of Wordybird."""

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Bytes in ``'512MiB'``, ``'1.5GiB'``, ``'8MB'`` or a plain number.

    Raises
    ------
    InvalidArgument
        If it is not a positive size.
    """
    if isinstance(text, int):
        size = text
    elif not isinstance(text, str):
        raise InvalidArgument(
            f"cannot read {text!r} as a size; write 512MiB, 1GiB or a whole number"
        )
    else:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_UNITS, "": 1}
        number = text.strip().rstrip("KMGTiBkmgtb")
        unit = text.strip()[len(number) :]
        known = {name.lower(): factor for name, factor in units.items()}
        try:
            size = int(float(number) * known[unit.lower()])
        except (ValueError, KeyError, OverflowError):
            raise InvalidArgument(
                f"cannot read {text!r} as a size; write a number and a unit, such as 512MiB or 1GiB"
            ) from None
    if size < 1:
        raise InvalidArgument(f"a size must be positive, got {text!r}")
    return size


def format_bytes(size: float | None) -> str:
    """Size in the largest binary unit that leaves at least 1; ``unknown`` if it is None."""
    if size is None:
        return "unknown"
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"
