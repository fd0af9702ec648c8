"""The name that somebody probably meant who typed another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What a message says after a name that is not known: the nearest one, or nothing.

    Parameters
    ----------
    name : str
        As it was typed.
    known : iterable of str
        Names that there are.

    Examples
    --------
    >>> f"there is no preset 'gatsbi'{did_you_mean('gatsbi', ['gatsby', 'duckling'])}"
    "there is no preset 'gatsbi' (did you mean 'gatsby'?)"
    >>> did_you_mean("moby-dick", ["gatsby", "duckling"])
    ''
    """
    folded = {_folded(one): one for one in known}
    nearest = difflib.get_close_matches(_folded(name), folded, n=1)
    # Of two letters that were exchanged, difflib finds half: rl is no lr to it.
    nearest += [one for one in folded if sorted(one) == sorted(_folded(name))]
    return f" (did you mean {folded[nearest[0]]!r}?)" if nearest else ""


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
