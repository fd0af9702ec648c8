"""Sizes in bytes and durations in seconds, as texts that people read and type."""

from __future__ import annotations

from trajstore.errors import InvalidArgument

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
            f"got size {text!r}, expected a string such as 512MiB or 1GiB, or a whole number"
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
                f"got size {text!r}, expected a number and a unit, such as 512MiB or 1GiB"
            ) from None
    if size < 1:
        raise InvalidArgument(f"got size {text!r}, expected at least 1 byte")
    return size


def format_bytes(size: float | None) -> str:
    """Size in the largest binary unit in which it is at least 1; ``unknown`` if it is None."""
    if size is None:
        return "unknown"
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as ``2 min 20 s``.

    Parameters
    ----------
    seconds : float

    Examples
    --------
    >>> [format_duration(seconds) for seconds in (0.0042, 1.44, 140, 3720, 360_000)]
    ['4.2 ms', '1.4 s', '2 min 20 s', '1 h 2 min', '4 d 4 h']
    """
    if seconds <= 0:  # the difference of two clocks can be negative
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds >= 0.0995 else f"{seconds * 1000:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, length, smaller, part in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            count, rest = divmod(whole, length)
            return f"{count} {unit}" + (f" {rest // part} {smaller}" if rest // part else "")
    return f"{whole} s"
