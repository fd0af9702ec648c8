"""The page of one browser session, and the run behind it, which may still be recorded.

`LiveRun` holds the history of the run in memory and reads new rows. Sessions share it.
"""

from __future__ import annotations

import html
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.exploring import plots
from trajstore.analysis.exploring.plots import (
    RunHistory,
    TokenList,
    cause_sentences,
    nearest,
    prepare,
    token_history,
)
from trajstore.analysis.figures.style import (
    CAUSE_COLORS,
    REGIME_COLORS,
    population_color,
    titled_runs,
)
from trajstore.analysis.scan.block_tasks import Report
from trajstore.errors import TrajstoreError
from trajstore.store.reading.open_run import open_run
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import location

_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A consistent state of a run at one moment.

    Attributes
    ----------
    history : RunHistory
    tokens : TokenList
    ds : Dataset
        Opened without dask, for single tokens.
    standing : str
        ``recording``, ``interrupted`` or ``complete``; ``abandoned`` if the run is marked
        ``recording``, but its process died.
    trouble : str
        Why no newer state can be read; otherwise empty.
    """

    history: RunHistory
    tokens: TokenList
    ds: xr.Dataset
    standing: str
    trouble: str = ""


class LiveRun:
    """Reads a run, and reads it again in a thread when it has grown.

    Reading takes at most a tenth of the time.

    Parameters
    ----------
    path : path-like
        A local run.
    report : callable, optional
        Called with the number of finished tasks of the first reading, and of all tasks.

    Attributes
    ----------
    state : RunState
        The newest state; replaced as a whole.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    VariableNotRecorded, InvalidArgument
        As `trajstore.analysis.exploring.plots.prepare`; for an address.
    """

    def __init__(self, path: str | os.PathLike[str], report: Report | None = None) -> None:
        self._path = path
        self.state = self._whole(*self._look(), report)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="explore", daemon=True)

    def __enter__(self) -> LiveRun:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Read the run again, if it has changed.

        Raises
        ------
        TrajstoreError, OSError
            If the run cannot be read now; the earlier state stays.
        """
        ds, status = self._look()
        state = self.state
        if ds.attrs != state.ds.attrs:
            self.state = self._whole(ds, status)
        elif status != state.standing or state.trouble:
            self.state = replace(state, standing=status, trouble="")

    def _look(self) -> tuple[xr.Dataset, str]:
        """Open the run, and return it with its state."""
        # Read the lock first: a writer marks the end in the root before it releases the lock.
        written_to = is_written_to(location(self._path))
        ds = open_run(self._path, chunks=None)
        status = str(ds.attrs.get("status", "complete"))
        return ds, "abandoned" if status == "recording" and written_to is False else status

    def _whole(self, ds: xr.Dataset, status: str, report: Report | None = None) -> RunState:
        history = prepare(open_run(self._path), report)
        return RunState(history=history, tokens=TokenList(ds), ds=ds, standing=status)

    def _follow(self) -> None:
        took = 0.0
        while not self._stop.wait(max(_SECONDS, 9 * took)):
            begin = time.monotonic()
            try:
                self.look()
            except (TrajstoreError, OSError) as error:
                trouble = str(error)
                if trouble != self.state.trouble:
                    self.state = replace(self.state, trouble=trouble)
            took = time.monotonic() - begin


_CURVES = {
    "training loss": ("loss", "loss"),
    "gradient norms (L2)": ("grad_norms", "mean"),
    "displacement from the first step (L2)": ("displacement", "mean"),
    "fraction of unchanged tokens": ("freeze", "unchanged_fraction"),
    "fraction of frozen tokens": ("freeze", "frozen_fraction"),
}
"""Figure and variable of each curve by its title."""

_OF_TOKEN = {
    "hop": "hops of the token (L1, lattice spacings)",
    "gradient": "gradient norm of the token (L2)",
}
_FROM_THE_OTHER_END = """
if (cb_obj.direction > 0 && cb_obj.value >= cb_obj.end) cb_obj.value = cb_obj.start;
if (cb_obj.direction < 0 && cb_obj.value <= cb_obj.start) cb_obj.value = cb_obj.end;
"""
"""Where the player starts if it stands at the end; runs in the browser."""

_LOOK = 1000  # milliseconds between two updates of the page


class Page:
    """One session.

    Parameters
    ----------
    live : LiveRun
    """

    def __init__(self, live: LiveRun) -> None:
        import holoviews as hv
        import panel as pn

        self._live = live
        self._state = live.state
        self._at = int(self._state.history.last_motion.values.argmax())  # with the latest change
        self._one = token_history(self._state.ds, self._at, self._state.history)
        tokens = self._state.tokens
        self._kinds = tokens.kinds
        self._of_token: dict[str, Any] = {"kind": self._kinds}
        if self._kinds.size <= plots.MANY:
            self._of_token["token"] = np.array([tokens.label(at) for at in range(tokens.ids.size)])
        self._steps: list[Any] = []  # marks of the step
        self._ranks: list[Any] = []  # marks of the token among the layers
        event = hv.streams.Counter
        self._moved, self._chosen, self._renewed = event(), event(), event()
        self._placed = event()  # the step or the token changed
        self._make_widgets(pn)
        self._content = self._layout(pn)
        self._show_status()
        self._show_step()
        self._show_token()
        self._find("")
        # Later: the slider does not know its length yet.
        pn.state.onload(lambda: setattr(self._player, "value", self._player.end))
        pn.state.add_periodic_callback(self._renew, _LOOK)

    def view(self) -> Any:
        """The page for the server."""
        import panel as pn

        text = files("trajstore.analysis.exploring").joinpath("page.html").read_text()
        template = pn.Template(text)
        template.add_panel("page", self._content)
        return template

    # Content.

    def _make_widgets(self, pn: Any) -> None:
        import bokeh.models.widgets.tables as bokeh_tables

        rows = self._state.history.position.sizes["step"]
        self._player = pn.widgets.Player(
            label="step", start=0, end=rows - 1, value=0, interval=200, loop_policy="once",
            show_loop_controls=False, width=None, min_width=300, sizing_mode="stretch_width",
        )  # fmt: skip
        self._search = pn.widgets.TextInput(
            placeholder="Text or id of a token; Enter selects the first",
            width=None,
            sizing_mode="stretch_width",
        )
        whole = bokeh_tables.NumberFormatter(format="0,0", nan_format="never", text_align="right")
        numbers = dict.fromkeys(("count in text", "last change", "changes"), whole)
        self._table = pn.widgets.Tabulator(
            self._rows(""), pagination="remote", page_size=8, show_index=False, disabled=True,
            selectable=False, formatters={"text": {"type": "plaintext"}, **numbers},
            layout="fit_data_fill", sizing_mode="stretch_width", theme="simple", height=330,
        )  # fmt: skip
        self._status, self._step, self._token, self._found = (
            pn.pane.HTML("", sizing_mode="stretch_width") for _ in range(4)
        )
        self._player.jscallback(direction=_FROM_THE_OTHER_END)
        self._player.param.watch(lambda _: self._show_step(), "value")
        self._search.param.watch(lambda event: self._search_for(event.new), "value_input")
        self._search.param.watch(lambda _: self._choose_first(), "enter_pressed")
        self._table.on_click(self._clicked)

    def _layout(self, pn: Any) -> Any:
        def wide(*parts: Any) -> Any:
            return pn.Column(*parts, styles={"flex": "1 1 340px", "min-width": "0"})

        def row(*parts: Any) -> Any:
            return pn.FlexBox(*parts, gap="12px", sizing_mode="stretch_width")

        def titled(
            title: str,
            plot: Any,
            colors: Mapping[str, str] | None = None,
            marks: Sequence[str] = (),
        ) -> Any:
            text = f"<b>{html.escape(title)}</b>{_legend(colors or {})}"
            text += "".join(f' <span style="white-space: nowrap">{part}</span>' for part in marks)
            heading = pn.pane.HTML(text, sizing_mode="stretch_width")
            return wide(heading, pn.pane.HoloViews(plot, sizing_mode="stretch_width"))

        names = self._state.history.populations
        colors = {name: population_color(name) for name in names}
        share = self._state.history.plane["share"].values
        plane = (
            f"principal components 1 ({share[0]:.1%} of the variance of W) and 2 ({share[1]:.1%})"
        )
        curves = [
            titled(title, self._curve(figure, name), colors if figure != "loss" else None)
            for title, (figure, name) in _CURVES.items()
            if figure in self._state.history.data
        ]
        causes = dict(list(CAUSE_COLORS.items())[1:])
        of_token = [
            titled(title, self._token_curve(name), causes if name == "hop" else None)
            for name, title in _OF_TOKEN.items()
            if name in self._one
        ]
        layers = "update-size heatmap, tokens by last change"
        return pn.Column(
            self._status,
            self._player,
            self._step,
            row(
                titled(plane, self._plane(), colors, plots.MARKS),
                wide(self._search, self._found, self._table, self._token),
            ),
            row(*of_token),
            row(titled(layers, self._layers(), REGIME_COLORS), *curves),
            sizing_mode="stretch_width",
        )

    def _plane(self) -> Any:
        import holoviews as hv

        points: Any = hv.DynamicMap(lambda counter: self._points(), streams=[self._moved])
        xlim, ylim = plots.limits(self._state.history)
        many = self._kinds.size > plots.MANY
        shown = plots.shaded(points, self._kinds, xlim, ylim) if many else points
        path = hv.DynamicMap(lambda counter: plots.path_plot(self._one), streams=[self._chosen])
        here = hv.DynamicMap(
            lambda counter: plots.here_plot(self._one, self._step_shown()), streams=[self._placed]
        )
        return (shown * path * here).opts(
            responsive=True, height=430, xlim=xlim, ylim=ylim, show_legend=False,
            active_tools=[], toolbar="above", hooks=[_without_logo, self._listen],
        )  # fmt: skip

    def _points(self) -> Any:
        position = self._state.history.position.values[self._player.value]
        return plots.plane_points(position, self._of_token)

    def _curve(self, figure: str, name: str) -> Any:
        import holoviews as hv

        drawn = hv.DynamicMap(
            lambda counter: plots.curve_plot(self._state.history.data[figure], figure, name),
            streams=[self._renewed],
        )
        return self._along_steps(drawn, logy=figure == "grad_norms")

    def _token_curve(self, name: str) -> Any:
        import holoviews as hv

        drawn = hv.DynamicMap(
            lambda counter: plots.token_curve(self._one, name), streams=[self._chosen]
        )

        # HoloViews keeps the range of the first token, because it updates the parts in place.
        def follow(plot: Any, element: Any) -> None:
            plot.state.y_range.update(**plots.token_range(self._one, name))

        return self._along_steps(drawn, follow, logy=True)

    def _layers(self) -> Any:
        import holoviews as hv

        drawn = hv.DynamicMap(
            lambda counter: plots.layer_plot(self._state.history.data["heatmap"]),
            streams=[self._renewed],
        )
        return self._along_steps(drawn, self._mark_rank)

    def _along_steps(self, drawn: Any, *hooks: Callable[[Any, Any], None], **options: Any) -> Any:
        return drawn.opts(
            responsive=True, height=220, xlabel="optimizer step", ylabel="", framewise=True,
            show_legend=False, active_tools=[], toolbar="above",
            hooks=[_without_logo, self._mark_step, *hooks], **options,
        )  # fmt: skip

    # Hooks: HoloViews calls them at every update of a Bokeh figure.

    def _listen(self, plot: Any, element: Any) -> None:
        if not plot.state.tags:
            plot.state.tags = ["listens"]
            plot.state.on_event("tap", lambda event: self._tapped(event.x, event.y))

    def _mark_step(self, plot: Any, element: Any) -> None:
        if self._mark(plot.state, "height", self._steps, self._step_shown()):
            plot.state.on_event("tap", lambda event: self._go_to(event.x))

    def _mark_rank(self, plot: Any, element: Any) -> None:
        self._mark(plot.state, "width", self._ranks, self._rank_shown())

    def _mark(self, figure: Any, dimension: str, marks: list[Any], where: float) -> bool:
        """Add a movable line across a figure; return True if it is new."""
        from bokeh.models import Span

        if any(isinstance(part, Span) and part.dimension == dimension for part in figure.center):
            return False
        span = Span(location=where, dimension=dimension, line_color="#000000", line_width=1.5)
        figure.add_layout(span)
        marks.append(span)
        return True

    # Events.

    def _step_shown(self) -> int:
        history = self._state.history
        return int(history.position["step"].values[self._player.value])

    def _rank_shown(self) -> float:
        return self._state.history.rank(self._at) + 0.5

    def _show_step(self) -> None:
        step, history = self._step_shown(), self._state.history
        for span in self._steps:
            span.location = step
        texts = [f"step {step:,} of {history.last_step:,}"]
        if "loss" in history.data:
            texts.append(f"loss {float(history.data['loss']['loss'].sel(step=step)):.4f}")
        self._step.object = f"<b>{', '.join(texts)}</b>"
        self._moved.event()
        self._placed.event()

    def _go_to(self, step: float) -> None:
        """Show the row nearest to a step."""
        if step is None or not math.isfinite(step):
            return
        steps = self._state.history.position["step"].values
        row = int(np.abs(steps - step).argmin())
        _in_turn(lambda: setattr(self._player, "value", row))

    def _rows(self, text: str) -> Any:
        import pandas

        tokens = self._state.tokens
        return pandas.DataFrame(tokens.columns(tokens.find(text), self._state.history))

    def _search_for(self, text: str) -> None:
        self._find(text)
        self._table.page = 1  # the best matches

    def _find(self, text: str) -> None:
        rows = self._rows(text)
        self._table.value = rows
        self._found.object = f"{len(rows):,} tokens" if len(rows) != 1 else "1 token"

    def _choose_first(self) -> None:
        """Choose the best match of the search."""
        matches = self._state.tokens.find(self._search.value_input)
        if matches.size:
            _in_turn(lambda: self._choose(int(matches[0])))

    def _clicked(self, event: Any) -> None:
        number = int(self._table.value["id"].iloc[event.row])
        at = int(np.flatnonzero(self._state.tokens.ids == number)[0])
        _in_turn(lambda: self._choose(at))

    def _tapped(self, x: float, y: float) -> None:
        if x is None or not (math.isfinite(x) and math.isfinite(y)):
            return
        xlim, ylim = plots.limits(self._state.history)
        position = self._state.history.position.values[self._player.value]
        at = nearest(position, x, y, xlim[1] - xlim[0], ylim[1] - ylim[0])
        if at is not None:
            _in_turn(lambda: self._choose(at))

    def _choose(self, at: int) -> None:
        self._at = at
        self._one = token_history(self._state.ds, at, self._state.history)
        self._show_token()

    def _show_token(self) -> None:
        for span in self._ranks:
            span.location = self._rank_shown()
        self._token.object = self._token_text()
        self._chosen.event()
        self._placed.event()

    def _token_text(self) -> str:
        tokens, history = self._state.tokens, self._state.history
        lines = [f"<b>{html.escape(tokens.label(self._at))}</b> {tokens.kind(self._at)}".rstrip()]
        lines += map(html.escape, cause_sentences(self._one))
        if "cause" in history.unknown:
            lines.append(f"Cause not available: {html.escape(history.unknown['cause'])}")
        return "<br>".join(lines)

    # Updates while the page is open.

    def _renew(self) -> None:
        state, before = self._live.state, self._state
        if state is before:
            return
        newest = self._player.value == self._player.end
        shown = self._step_shown()
        self._state = state
        self._player.end = state.history.position.sizes["step"] - 1
        if newest:
            self._player.value = self._player.end
        else:
            self._go_to(shown)
        self._show_status()
        if state.history is before.history:
            return
        self._renewed.event()
        self._show_step()
        self._find(self._search.value_input)
        self._choose(self._at)

    def _show_status(self) -> None:
        state = self._state
        texts = [f"<b>{html.escape(titled_runs([state.ds]))}</b>", html.escape(state.standing)]
        texts.append(f"{state.history.rows:,} rows")
        if state.history.every > 1:
            texts.append(f"positions at every {state.history.every}th row")
        notes = [f"Not available: {name}; {why}." for name, why in state.history.unknown.items()]
        notes += [f"New rows cannot be read: {state.trouble}."] if state.trouble else []
        self._status.object = "<br>".join([", ".join(texts), *map(html.escape, notes)])


def _in_turn(change: Callable[[], None]) -> None:
    """Change the page with its lock held; clicks and Enter do not hold it."""
    import panel as pn

    pn.state.execute(change, schedule=True)


def _legend(colors: Mapping[str, str]) -> str:
    return "".join(
        f' <span style="white-space: nowrap"><span style="color: {color}">■</span> '
        f"{html.escape(name.replace('_', ' '))}</span>"
        for name, color in colors.items()
    )


def _without_logo(plot: Any, element: Any) -> None:
    """Remove the logo, which links to another site."""
    plot.state.toolbar.logo = None
