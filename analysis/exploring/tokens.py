"""Tokens of a run: a searchable list, and the history of one token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.cloud.shape import scores_along_axes
from trajstore.analysis.exploring.run_history import RunHistory
from trajstore.analysis.motion.norms import grad_norms
from trajstore.analysis.motion.ulp_motion import lattice_displacement
from trajstore.analysis.optimizer.freeze_causes import CAUSES
from trajstore.analysis.scan.scan import Scan


class TokenList:
    """Ids, texts and populations of the tokens of a run.

    Parameters
    ----------
    ds : Dataset

    Attributes
    ----------
    ids : ndarray of int64, (token,)
    texts : list of str, or None
        In quotes, with control characters escaped; a recorded backslash stays one backslash.
        None for a run without texts.
    kinds : ndarray of str, (token,)
        Dead or live; ``all`` if the run has no ``is_dead``.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self.ids: npt.NDArray[np.int64] = ds["token"].values.astype(np.int64)
        raw = [str(text) for text in ds["token_text"].values] if "token_text" in ds else None
        self.texts = None if raw is None else [_quoted(text) for text in raw]
        self._raw = None if raw is None else np.array(raw, "T")
        self._folded = None if raw is None else np.array([text.casefold() for text in raw], "T")
        self._has_kinds = "is_dead" in ds
        self.kinds: npt.NDArray[np.str_] = np.full(self.ids.size, "all")
        if self._has_kinds:
            self.kinds = np.where(ds["is_dead"].values, "dead", "live")
        self._count = ds["token_count"].values if "token_count" in ds else None

    def find(self, text: str) -> npt.NDArray[np.intp]:
        """Positions of the tokens with that id or text, the best first; all for an empty text.

        The order: the id; exactly the text; the text apart from blanks around it; also apart from
        case; texts that begin with it; texts that contain it.
        """
        wanted = text.casefold()
        if not wanted:
            return np.arange(self.ids.size)
        rank = np.full(self.ids.size, 9)
        if self._raw is not None and self._folded is not None:
            bare = np.strings.strip(self._folded)
            rank[np.strings.find(self._folded, wanted) >= 0] = 5
            rank[np.strings.startswith(bare, wanted)] = 4
            rank[(self._folded == wanted) | (bare == wanted.strip())] = 3
            rank[np.strings.strip(self._raw) == text.strip()] = 2
            rank[self._raw == text] = 1
        if text.strip().isdecimal():
            rank[self.ids == int(text)] = 0
        there = np.flatnonzero(rank < 9)
        return there[np.argsort(rank[there], kind="stable")]

    def label(self, at: int) -> str:
        """Text and id of a token."""
        text = "" if self.texts is None else f"{self.texts[at]} "
        return f"{text}({self.ids[at]})"

    def kind(self, at: int) -> str:
        """Dead or live; empty if the run has no ``is_dead``."""
        return str(self.kinds[at]) if self._has_kinds else ""

    def columns(self, those: npt.NDArray[np.intp], history: RunHistory) -> dict[str, Any]:
        """Columns of a table of some tokens; NaN for never and for unknown values."""
        columns: dict[str, Any] = {"id": self.ids[those]}
        if self.texts is not None:
            columns["text"] = [self.texts[at] for at in those]
        if self._has_kinds:
            columns["kind"] = self.kinds[those]
        if self._count is not None:
            columns["count in text"] = _known(self._count[those])
        columns["last change"] = _known(history.last_motion.values[those])
        columns["changes"] = history.data["tokens"]["moves"].values[those]
        return columns


def _quoted(text: str) -> str:
    r"""Text in quotes, with control characters as Python escapes.

    >>> print(_quoted("a\n"))
    'a\n'
    """
    return "'" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + "'"


def nearest(
    position: npt.NDArray[np.float32], x: float, y: float, width: float, height: float
) -> int | None:
    """Index of the position nearest to a point, in axes of this width and height.

    Parameters
    ----------
    position : ndarray, (token, 2)
    x, y : float
    width, height : float
        Lengths of equal size on the screen.

    Returns
    -------
    int or None
        None without a finite position.
    """
    distance = np.hypot((position[:, 0] - x) / width, (position[:, 1] - y) / height)
    return None if not np.isfinite(distance).any() else int(np.nanargmin(distance))


def token_history(ds: xr.Dataset, at: int, history: RunHistory) -> xr.Dataset:
    """History of a token at each row; reads its vectors.

    Parameters
    ----------
    ds : Dataset
        The run of the history, opened without dask.
    at : int
        Position of the token.
    history : RunHistory

    Returns
    -------
    Dataset
        ``position``, float32 (step, component), at every row; ``hop``, float32, the L1 norm in
        lattice spacings, NaN at the first row; ``gradient``, float32, the L2 norm, if
        recorded; ``cause``, int8, if available, −1 at the first row; all (step).
    """
    names = [name for name in ("W", "grad") if name in ds]
    one = ds[names].isel(token=slice(at, at + 1), step=slice(history.rows)).load()
    scan = Scan(one)
    steps = one["step"]
    found = {
        "position": scores_along_axes(scan, history.plane).astype(np.float32),
        "hop": lattice_displacement(scan, ord=1).reindex(step=steps),
    }
    if "grad" in one:
        found["gradient"] = grad_norms(scan)
    if "cause" in history.data:
        cause = history.data["cause"]["cause"].isel(token=slice(at, at + 1))
        found["cause"] = cause.reindex(step=steps, fill_value=-1)
    return xr.Dataset({name: array.isel(token=0) for name, array in found.items()}).compute()


def cause_sentences(token: xr.Dataset) -> list[str]:
    """Sentences about the unchanged steps of a token, and their causes.

    Parameters
    ----------
    token : Dataset
        Result of `token_history`.

    Examples
    --------
    >>> import xarray as xr
    >>> token = {"hop": ("step", [float("nan"), 3, 0]), "cause": ("step", [-1, 0, 2])}
    >>> cause_sentences(xr.Dataset(token, {"step": [0, 1, 2]}))
    ['Last change at step 1; unchanged for 1 row since: lost update.']
    """
    moved = np.flatnonzero(token["hop"].values[1:] != 0) + 1  # a hop of NaN is a change
    transitions = token.sizes["step"] - 1
    sentences = []
    last = int(moved[-1]) if moved.size else 0
    unchanged = transitions - last
    if not moved.size:
        sentences.append(f"Never changed, in {_rows(transitions)}{_why(token, 1)}.")
    elif unchanged:
        step = int(token["step"][last])
        sentences.append(
            f"Last change at step {step:,}; unchanged for {_rows(unchanged)} since"
            f"{_why(token, last + 1)}."
        )
    else:
        sentences.append("Changed at the last row.")
    before = last - moved.size
    if before > 0:
        why = _why(token, 1, last)
        sentences.append(f"Before that, unchanged in {_rows(before)} of {last:,}{why}.")
    return sentences


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def _why(token: xr.Dataset, first: int, stop: int | None = None) -> str:
    """Causes in these rows, the most common first, with fractions if there are several."""
    if "cause" not in token:
        return ""
    causes = token["cause"].values[first:stop]
    counts = np.bincount(causes[causes > 0], minlength=len(CAUSES))
    order = [at for at in np.argsort(-counts, kind="stable") if counts[at]]
    if not order:
        return ""
    if len(order) == 1:
        return f": {CAUSES[order[0]].replace('_', ' ')}"
    shares = (f"{counts[at] / counts.sum():.1%} {CAUSES[at].replace('_', ' ')}" for at in order)
    return ": " + ", ".join(shares)


def _known(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.where(numbers >= 0, numbers, np.nan)
