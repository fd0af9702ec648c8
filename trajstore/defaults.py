"""Defaults of memory and commits, which the writer, trainings and commands share."""

from __future__ import annotations

import math

from trajstore.errors import InvalidArgument

DEFAULT_MEMORY = 1 << 30
"""Bytes that a writer may use."""

EXCHANGE_MEMORY = "320MiB"
"""Size of the one block that an import or an export to Zarr holds: 8 rows of Wordybird."""

COMMIT_EVERY = 10.0
"""Default of the seconds between commits."""


def check_commit_every(seconds: float | None) -> None:
    """Raise an error unless the seconds between commits are valid.

    Raises
    ------
    InvalidArgument
        If they are not positive, or not finite.
    """
    if seconds is not None and not (0 < seconds < math.inf):
        raise InvalidArgument(
            f"commit_every: got {seconds}, expected seconds above 0, or None for whole blocks only"
        )
