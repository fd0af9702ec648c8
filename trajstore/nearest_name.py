"""The known name that a mistyped name probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SYNONYMS = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "weight": "w",
    "weights": "w",
}
"""Names of other programs that are spelled too differently for a search by similarity."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, as the continuation of an error message.

    Parameters
    ----------
    name : str
        The typed name.
    known : iterable of str
        The valid names.

    Returns
    -------
    str
        `` (did you mean 'NAME'?)``; empty if no name is near.

    Examples
    --------
    >>> f"there is no preset 'gatsbi'{did_you_mean('gatsbi', ['gatsby', 'duckling'])}"
    "there is no preset 'gatsbi' (did you mean 'gatsby'?)"
    >>> did_you_mean("learning_rate", ["name", "lr"])
    " (did you mean 'lr'?)"
    >>> did_you_mean("weights", ["W", "grad"])
    " (did you mean 'W'?)"
    >>> did_you_mean("moby-dick", ["gatsby", "duckling"])
    ''
    """
    folded = {_folded(one): one for one in known}
    typed = _folded(name)
    nearest = [_SYNONYMS[typed]] if _SYNONYMS.get(typed) in folded else []
    nearest += difflib.get_close_matches(typed, folded, n=1)
    # difflib misses half of all swapped letters: to it, rl is not near lr.
    nearest += [one for one in folded if sorted(one) == sorted(typed)]
    nearest += [one for one in folded if typed and typed == _initials(one)]
    nearest += [one for one in folded if one and one == _initials(typed)]
    return f" (did you mean {folded[nearest[0]]!r}?)" if nearest else ""


def _initials(name: str) -> str:
    """Initials of a name of several words: lr for learning_rate. Otherwise empty."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
