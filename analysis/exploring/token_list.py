"""The tokens of a run as a list: what is said of each, and how one is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.exploring.run_history import RunHistory

__all__ = ["TokenList", "nearest"]


class TokenList:
    """Ids, texts and populations of the tokens of a run.

    Parameters
    ----------
    ds : Dataset

    Attributes
    ----------
    ids : ndarray of int64, (token,)
    texts : list of str, or None
        As Python writes them, with quotes: nothing is left of them that a page or a terminal
        would obey, and blanks are seen. None for a run that has no texts.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self.ids: npt.NDArray[np.int64] = ds["token"].values.astype(np.int64)
        raw = [str(text) for text in ds["token_text"].values] if "token_text" in ds else None
        self.texts = None if raw is None else [repr(text) for text in raw]
        self._folded = None if raw is None else np.array([text.casefold() for text in raw], "T")
        self._dead = ds["is_dead"].values if "is_dead" in ds else None
        self._count = ds["token_count"].values if "token_count" in ds else None

    def find(self, text: str) -> npt.NDArray[np.intp]:
        """Positions of the tokens with that id or text, the best first.

        First the one of that id, then such as are that text, but for blanks around it, then such
        as begin with it, then such as hold it; upper and lower case are the same. All tokens for
        an empty text.
        """
        wanted = text.casefold()
        if not wanted:
            return np.arange(self.ids.size)
        rank = np.full(self.ids.size, 9)
        if self._folded is not None:
            bare = np.strings.strip(self._folded)
            rank[np.strings.find(self._folded, wanted) >= 0] = 3
            rank[np.strings.startswith(bare, wanted)] = 2
            rank[(self._folded == wanted) | (bare == wanted.strip())] = 1
        if text.strip().isdecimal():
            rank[self.ids == int(text)] = 0
        there = np.flatnonzero(rank < 9)
        return there[np.argsort(rank[there], kind="stable")]

    def label(self, at: int) -> str:
        """How a token is called: its text, and its id."""
        text = "" if self.texts is None else f"{self.texts[at]} "
        return f"{text}({self.ids[at]})"

    def kind(self, at: int) -> str:
        """Dead or live; empty where the run does not say it."""
        return "" if self._dead is None else ("dead" if self._dead[at] else "live")

    @property
    def kinds(self) -> npt.NDArray[np.str_]:
        """Dead or live, of each; ``all`` where the run does not say it."""
        if self._dead is None:
            return np.full(self.ids.size, "all")
        return np.where(self._dead, "dead", "live")

    def columns(self, those: npt.NDArray[np.intp], history: RunHistory) -> dict[str, Any]:
        """Columns of a table of some tokens; NaN for never, and for what is not known."""
        columns: dict[str, Any] = {"id": self.ids[those]}
        if self.texts is not None:
            columns["text"] = [self.texts[at] for at in those]
        if self._dead is not None:
            columns["kind"] = np.where(self._dead[those], "dead", "live")
        if self._count is not None:
            columns["in the text"] = _known(self._count[those])
        columns["last motion"] = _known(history.last_motion.values[those])
        columns["moves"] = history.moves.values[those]
        return columns


def nearest(
    position: npt.NDArray[np.float32], x: float, y: float, width: float, height: float
) -> int | None:
    """Which position is nearest to a place, as it is seen in axes of that width and height.

    Parameters
    ----------
    position : ndarray, (token, 2)
    x, y : float
    width, height : float
        Lengths that look the same on the screen.

    Returns
    -------
    int or None
        None if no position is finite.
    """
    distance = np.hypot((position[:, 0] - x) / width, (position[:, 1] - y) / height)
    return None if not np.isfinite(distance).any() else int(np.nanargmin(distance))


def _known(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.where(numbers >= 0, numbers, np.nan)
