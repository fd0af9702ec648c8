"""What the page shows: the history of a run in memory, a list of its tokens, and their figures.

HoloViews draws the figures on Bokeh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.figures.figure import Options, compute_together
from trajstore.analysis.figures.sheet import FIGURES
from trajstore.analysis.figures.style import CAUSE_COLORS, REGIME_COLORS, population_color
from trajstore.analysis.geometry.shape import pca, scores_along_axes
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.ulp_motion import lattice_displacement
from trajstore.analysis.motion.vectors import grad_norms
from trajstore.analysis.optimizer.freeze_causes import CAUSES, freeze_cause
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Report, progress_of_tasks
from trajstore.analysis.scan.rows import REGIMES
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as it was read, small enough for memory.

    Attributes
    ----------
    last_step, rows : int
    every : int
        Positions are in memory for rows 0, `every`, 2·`every`, …
    plane : Dataset
        ``basis`` and ``basis_mean`` of `analysis.pca`, ``share`` of the variance along each axis.
    data : mapping
        By name. ``position``: ``scores`` (step, token, component), float32, at these rows.
        ``tokens``: ``last_motion`` and ``moves`` (token) of `analysis.freeze`. ``heatmap``,
        ``freeze``, ``loss``, ``gradients`` and ``displacement``: data of these figures. ``cause``
        (step, token), int8, of `analysis.freeze_cause`. As available.
    populations : list of str
        Populations with curves.
    unknown : mapping
        Reason for each quantity that is not available, by name.
    """

    last_step: int
    rows: int
    every: int
    plane: xr.Dataset
    data: Mapping[str, xr.Dataset]
    populations: list[str]
    unknown: Mapping[str, str]

    @property
    def position(self) -> xr.DataArray:
        """Positions of the tokens in the plane, (step, token, component)."""
        return self.data["position"]["scores"]

    @property
    def last_motion(self) -> xr.DataArray:
        """Step of the last change of each token, −1 if none."""
        return self.data["tokens"]["last_motion"]

    def rank(self, at: int) -> int:
        """Rank of a token in the order of the last changes."""
        order = np.argsort(self.last_motion.values, kind="stable")
        return int(np.flatnonzero(order == at)[0])


def prepare(
    ds: xr.Dataset,
    report: Report | None = None,
    *,
    position_bytes: int = 512 << 20,
    map_bytes: int = 2 << 30,
) -> RunHistory:
    """Read a run block by block: once for the plane, once for causes, once for everything else.

    Parameters
    ----------
    ds : Dataset
        A run with ``W``, opened with dask.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.
    position_bytes : int
        Memory for the positions; those of a longer run are of every nth row.
    map_bytes : int
        Memory for the maps of tokens and steps.

    Raises
    ------
    VariableNotRecorded
        If the run has no W.
    InvalidArgument
        If there are fewer than two rows, or too many for two bytes per token and step.
    """
    input_checks.require_variables(ds, "W")
    rows, tokens = ds.sizes["step"], ds.sizes["token"]
    if rows < 2:
        raise InvalidArgument(f"explore needs at least 2 rows, got {rows}; wait for more rows")
    if 2 * rows * tokens > map_bytes:
        raise InvalidArgument(
            f"explore keeps two bytes per token and step: {format_bytes(2 * rows * tokens)} for "
            f"{rows:,} rows of {tokens:,} tokens, expected at most {format_bytes(map_bytes)}; "
            "export a smaller run with trajstore export --select"
        )
    every = -(-rows * tokens * 8 // position_bytes)
    with progress_of_tasks(report):
        (made,) = compute_together(
            [pca(Scan(ds), components=2)[["basis", "basis_mean", "spectrum"]]]
        )
        plane = made.assign(share=made["spectrum"] / made["spectrum"].sum())
        data, unknown = _measure(ds, plane, every)
    return RunHistory(
        last_step=int(ds["step"][-1]),
        rows=rows,
        every=every,
        plane=plane,
        data=data,
        populations=Options().populations(Scan(ds)),
        unknown=unknown,
    )


def _measure(
    ds: xr.Dataset, plane: xr.Dataset, every: int
) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Computed quantities, and the reason for missing ones."""
    scan = Scan(ds, {"native": ("regime", "moved")})
    position = scores_along_axes(scan, plane).astype(np.float32).isel(step=slice(None, None, every))
    questions: dict[str, Callable[[], xr.Dataset]] = {
        "position": lambda: position.to_dataset(name="scores"),
        "tokens": lambda: freeze(scan)[["last_motion", "moves"]],
        "cause": lambda: freeze_cause(scan).to_dataset(name="cause"),
    }
    for name in ("heatmap", "freeze", "loss", "grad_norms", "displacement"):
        questions[name] = partial(FIGURES[name].computation.collect, scan, Options())
    lazy, unknown = input_checks.available(questions)
    measured: dict[str, xr.Dataset] = {}
    # Causes need four matrices at once: a separate reading keeps fewer blocks in memory.
    for names in (lazy.keys() - {"cause"}, lazy.keys() & {"cause"}):
        measured |= zip(names, compute_together([lazy[name] for name in names]), strict=True)
    return measured, unknown


MANY = 3000
"""Number of tokens above which Datashader counts them in cells."""

Limits = tuple[float, float]

_AXES = ("axis 1", "axis 2")
_INK = "#222222"
_HERE = "#cc0077"
_CELLS = (700, 500)
_WIDTH = 1000  # cells of the heatmap along the steps


def limits(history: RunHistory) -> tuple[Limits, Limits]:
    """Limits of both axes that contain all tokens at all steps."""
    ranges = []
    for axis in range(2):
        values = history.position.values[..., axis]
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        margin = 0.04 * (high - low) or 1.0
        ranges.append((low - margin, high + margin))
    return ranges[0], ranges[1]


def plane_points(position: npt.NDArray[np.float32], of: Mapping[str, Any]) -> Any:
    """Tokens in the plane at one step, with tooltips."""
    import holoviews as hv

    columns = {_AXES[0]: position[:, 0], _AXES[1]: position[:, 1], **of}
    points = hv.Points(columns, list(_AXES), list(of))
    if len(position) > MANY:
        return points
    tooltips = [("token", "@token"), ("kind", "@kind")]
    return points.opts(
        color=hv.dim("kind").categorize(_colors(of["kind"]), default="#888888"),
        size=6,
        alpha=0.7,
        line_color=None,
        tools=["hover"],
        hover_tooltips=tooltips,
    )


def _colors(of_kind: npt.NDArray[np.str_]) -> dict[str, str]:
    return {str(name): population_color(str(name)) for name in np.unique(of_kind)}


def shaded(points: Any, of_kind: npt.NDArray[np.str_], xlim: Limits, ylim: Limits) -> Any:
    """Many tokens, counted in cells of the plane: a stronger color for more tokens."""
    import datashader
    from holoviews.operation.datashader import datashade, dynspread

    cells = datashade(
        points,
        aggregator=datashader.by("kind", datashader.count()),
        color_key=_colors(of_kind),
        cnorm="log",
        min_alpha=90,
        x_range=xlim,
        y_range=ylim,
        width=_CELLS[0],
        height=_CELLS[1],
        streams=[],  # the ranges of the screen lag behind, and would cut tokens off
    )
    return dynspread(cells, threshold=0.8, max_px=2)


MARKS = ("○ start", "■ end", "◯ current step")
"""Legend of the marks on a token's path."""


def path_plot(token: xr.Dataset) -> Any:
    """Path of a token in the plane: an open circle at the start, a square at the end."""
    import holoviews as hv

    place = token["position"].values
    start = hv.Points(place[:1], list(_AXES)).opts(
        size=9, marker="circle", fill_color="white", line_color=_INK, line_width=1.5
    )
    end = hv.Points(place[-1:], list(_AXES)).opts(
        size=9, marker="square", fill_color=_INK, line_color="white"
    )
    return hv.Curve(place, *_AXES).opts(color=_INK, line_width=1.5) * start * end


def here_plot(token: xr.Dataset, step: int) -> Any:
    """Ring around the position of a token at a step, or at the nearest step in memory."""
    import holoviews as hv

    place = token["position"].sel(step=[step], method="nearest").values
    return hv.Points(place, list(_AXES)).opts(
        size=17, marker="circle", fill_alpha=0, line_color=_HERE, line_width=3
    )


def layer_plot(layers: xr.Dataset) -> Any:
    """Update-size heatmap: tokens in the order of their last change, colored by regime."""
    import holoviews as hv

    steps = layers["step"].values.astype(np.float64)
    stop = steps[-1] + (steps[-1] - steps[-2] if steps.size > 1 else 1)
    cells = min(_WIDTH, int(stop - steps[0]))
    # Steps may have gaps, pixels have none: each pixel shows the group at its beginning.
    places = steps[0] + np.arange(cells) * (stop - steps[0]) / cells
    group = np.searchsorted(steps, places, side="right") - 1
    colors = np.array([_rgb(REGIME_COLORS[name]) for name in REGIMES], np.uint8)
    picture = colors[layers["update_size"].transpose("group", "step").values[:, group]]
    tokens = int(layers["tokens"].sum())
    return hv.RGB(
        np.ascontiguousarray(picture[::-1]),
        bounds=(steps[0], 0, stop, tokens),
        kdims=["step", "rank"],
    )


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(color.removeprefix("#")))


def curve_plot(data: xr.Dataset, figure: str, name: str) -> Any:
    """One curve of a run: a line for each population, with a band of its tokens."""
    import holoviews as hv

    steps = data["step"].values
    value = f"{name} of {figure}"  # Panel gives plots of one name one axis
    if "population" not in data.dims:
        return hv.Overlay([hv.Curve((steps, data[name].values), "step", value).opts(color=_INK)])
    parts = []
    for population in data["population"].values.tolist():
        part, color = data.sel(population=population), population_color(population)
        if "quantiles" in part:
            low, high = part["quantiles"].transpose("quantile", "step").values
            band = hv.Area((steps, low, high), "step", [value, "high"])
            parts.append(band.opts(color=color, alpha=0.2, line_alpha=0))
        parts.append(hv.Curve((steps, part[name].values), "step", value).opts(color=color))
    return hv.Overlay(parts)


def token_curve(token: xr.Dataset, name: str) -> Any:
    """Hops or gradient of a token over the steps; below the hops, causes of unchanged steps."""
    import holoviews as hv

    steps = token["step"].values
    values = token[name].values.astype(np.float64)
    value = f"{name} of token"
    shown = np.where(values > 0, values, np.nan)  # on a logarithmic axis
    there = np.isfinite(np.pad(shown, 1, constant_values=np.nan))
    alone = there[1:-1] & ~there[:-2] & ~there[2:]  # no line reaches these
    # Always the same parts: HoloViews updates them in place.
    parts = [
        hv.Curve((steps, shown), "step", value).opts(color=_INK, line_width=1),
        hv.Scatter((steps[alone], shown[alone]), "step", value).opts(color=_INK, size=2),
    ]
    if name == "hop":
        parts += _causes(token, shown, value)
    return hv.Overlay(parts)


def token_range(token: xr.Dataset, name: str) -> dict[str, float]:
    """Limits of a logarithmic axis that contain all of `token_curve`."""
    values = token[name].values.astype(np.float64)
    shown = values[np.isfinite(values) & (values > 0)]
    low, high = (shown.min(), shown.max()) if shown.size else (3.0, 3.0)
    return {"start": float(low / 5), "end": float(high * 2)}


def _causes(token: xr.Dataset, shown: npt.NDArray[np.float64], value: str) -> list[Any]:
    """A row of squares below the hops for each cause, at the unchanged steps."""
    import holoviews as hv

    steps = token["step"].values
    causes = token["cause"].values if "cause" in token else np.zeros(steps.size, np.int8)
    least = np.nanmin(shown, initial=np.inf)
    below = least / 3 if np.isfinite(least) else 1.0
    rows = []
    for number, name in enumerate(CAUSES[1:], 1):
        at = steps[causes == number]
        squares = hv.Scatter((at, np.full(at.size, below)), "step", value)
        rows.append(squares.opts(color=CAUSE_COLORS[name], marker="square", size=5))
    return rows


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
    part = ds[names].isel(token=slice(at, at + 1), step=slice(history.rows)).load()
    scan = Scan(part)
    steps = part["step"]
    quantities = {
        "position": scores_along_axes(scan, history.plane).astype(np.float32),
        "hop": lattice_displacement(scan, ord=1).reindex(step=steps),
    }
    if "grad" in part:
        quantities["gradient"] = grad_norms(scan)
    if "cause" in history.data:
        cause = history.data["cause"]["cause"].isel(token=slice(at, at + 1))
        quantities["cause"] = cause.reindex(step=steps, fill_value=-1)
    return xr.Dataset({name: array.isel(token=0) for name, array in quantities.items()}).compute()


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
