"""Imports of optional packages: if one is missing, the error names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trajstore.errors import MissingExtra


@contextmanager
def needs_extra(needing: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Replace the error of a missing package by one that names its extra.

    A context manager, or a decorator of a function.

    Parameters
    ----------
    needing, extra, otherwise : str
        As for `MissingExtra`.

    Raises
    ------
    MissingExtra
        If an import in the block fails because a package is not installed.

    Examples
    --------
    >>> with needs_extra("a figure", "plot"):
    ...     import no_such_package
    Traceback (most recent call last):
    trajstore.errors.MissingExtra: a figure needs the extra plot: pip install -c ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "trajstore":
            raise
        raise MissingExtra(needing, extra, otherwise) from error
