"""Durations in readable units."""

from __future__ import annotations


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
