"""The name that somebody probably meant who typed another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]

_CALLED = {"gpu": "cuda", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What is called otherwise elsewhere, and reads like something else."""


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
    >>> did_you_mean("learning_rate", ["name", "lr"])
    " (did you mean 'lr'?)"
    >>> did_you_mean("moby-dick", ["gatsby", "duckling"])
    ''
    """
    folded = {_folded(one): one for one in known}
    typed = _folded(name)
    nearest = [_CALLED[typed]] if _CALLED.get(typed) in folded else []
    nearest += difflib.get_close_matches(typed, folded, n=1)
    # Of two letters that were exchanged, difflib finds half: rl is no lr to it.
    nearest += [one for one in folded if sorted(one) == sorted(typed)]
    nearest += [one for one in folded if typed and typed == _initials(one)]
    nearest += [one for one in folded if one and one == _initials(typed)]
    return f" (did you mean {folded[nearest[0]]!r}?)" if nearest else ""


def _initials(name: str) -> str:
    """Of a name of several words: lr of learning_rate."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
