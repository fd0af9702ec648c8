"""Reports in one HTML file: facts, verdicts, tables and figures of a run, or of several runs."""

from __future__ import annotations

import base64
import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.analysis.figures import FIGURES, Collected, Figure, Options, collect, draw_sheet
from trajstore.analysis.figures.figure import compute_together, prepared
from trajstore.analysis.figures.style import run_system
from trajstore.analysis.results.summary import Table, summary, summary_table, summary_tables
from trajstore.analysis.results.verdicts import (
    discontinuity_verdict,
    evidence,
    latest,
    reproduction,
    verdicts,
)
from trajstore.analysis.scan.scan import Scan, rows_of_window
from trajstore.analysis.several_runs import divergence
from trajstore.errors import InvalidArgument, VariableNotRecorded, needs_extra
from trajstore.installation import __version__
from trajstore.integrity.verify import verify
from trajstore.populations import populations
from trajstore.provenance import RunAttributes
from trajstore.schema import MIN_UNCHANGED
from trajstore.store.reading.open_run import final_loss, open_run, run_table
from trajstore.store.reading.run_attributes import (
    differing_settings,
    run_labels,
    settings,
    short_names,
)
from trajstore.store.reading.run_info import information, run_status
from trajstore.store.storage.remote_path import Location, RunPath, local_path, location
from trajstore.store.writing.create import check_file_target, staged_file
from trajstore.units import format_bytes

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps


_DPI = 160
_SIZE = (4.8, 4.2)
"""Inches of a figure: its text is legible at the width of a phone."""

_TOKENS = 12


def write_report(
    run: RunPath,
    path: str | os.PathLike[str],
    *,
    steps: Steps = None,
    within: bool = False,
    min_unchanged: int = MIN_UNCHANGED,
    check: bool = False,
    overwrite: bool = False,
    report: Callable[[int, int], None] | None = None,
    figures: Iterable[Figure] = tuple(FIGURES.values()),
) -> Path:
    """Write a report about a run: one HTML file that loads nothing from the network.

    Parameters
    ----------
    run : path-like, str or RemotePath
        A recording in progress is fine.
    path : path-like
        File of the page; ends in ``.html``.
    steps : str, int, slice or iterable of int, optional
        Steps that the figures show, as for `analysis.compute`. Sentences and tables cover the
        whole run.
    within : bool
        Compute the whole page from the rows of the window alone.
    min_unchanged : int
        Unchanged steps at the end that make a token frozen, as for `analysis.freeze`.
    check : bool
        Verify every stored byte, and print the result on the page.
    overwrite : bool
        Replace an existing page.
    report : callable, optional
        Called with the number of finished tasks and of all tasks.
    figures : iterable of Figure
        Figures to draw, as far as they show one run.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `run`.
    InvalidArgument, RunExists
        If the name ends otherwise; if the page exists.
    MissingExtra
        Without Jinja2 or matplotlib.
    """
    options = Options(steps=steps, within=within, min_unchanged=min_unchanged)

    def facts() -> dict[str, Any]:
        return _facts(location(run), options, check, report, figures)

    return write_page(path, facts, overwrite=overwrite)


def write_page(
    path: str | os.PathLike[str], facts: Callable[[], Mapping[str, Any]], *, overwrite: bool
) -> Path:
    """Render the template; compute `facts` only after the target is checked.

    Raises
    ------
    InvalidArgument, RunExists, MissingExtra
        As `write_report`.
    """
    template = _template()
    target = local_path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidArgument(f"got {target}, expected NAME.html; a report is an HTML page")
    check_file_target(target, overwrite=overwrite)
    html = template.render(**facts())
    with staged_file(target, overwrite=overwrite) as new:
        new.write_text(html, "utf-8")
    return target


def visible(text: object) -> str:
    """Text with visible symbols in place of control characters.

    >>> visible("a\\x1b[31mb\\n")
    'a␛[31mb\\n'
    """
    shown = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)}
    ranges = ((0x7F, 0xA0), (0x200E, 0x2010), (0x202A, 0x202F), (0x2066, 0x206A))
    hidden = {code: f"\\u{code:04x}" for first, stop in ranges for code in range(first, stop)}
    return str(text).translate(shown | hidden)


def _template() -> Any:
    with needs_extra("a report", "report"):
        import matplotlib  # noqa: F401
        from jinja2 import Environment, StrictUndefined
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["visible"] = visible
    return environment.from_string(
        files("trajstore.analysis.results").joinpath("report_page.html").read_text()
    )


def _facts(
    run: Location,
    options: Options,
    check: bool,
    report: Callable[[int, int], None] | None,
    figures: Iterable[Figure],
) -> dict[str, Any]:
    info = information(run)
    ds = open_run(run)
    alone = [figure for figure in figures if not figure.runs.between]
    pictures, left_out = drawn([ds], alone, options, report)
    scan = prepared(ds, [FIGURES["freeze"]], options).without_window()
    ds = scan.ds
    lazy, unknown = evidence(scan, options.min_unchanged)
    computed = dict(zip(lazy, compute_together(list(lazy.values()), report), strict=True))
    names, groups = populations(scan.ds)
    sizes = {name: int(group.sum()) for name, group in zip(names, groups, strict=True)}
    verdict_parts = [
        {"title": f"{number:,} {name.replace('_', ' ')} tokens", "sentences": sentences}
        for name, number in sizes.items()
        if number and (name != "all" or len(sizes) == 1)
        if (sentences := verdicts(computed, name, options.min_unchanged))
    ]
    general = [sentence for sentence in (_loss(ds), discontinuity_verdict(computed)) if sentence]
    general += [f"Not computed: {name}, because {why}." for name, why in unknown.items()]
    steps = info["steps"]
    span = f"{info['committed_rows']:,} rows"
    return {
        "name": run.name,
        "system": run_system(ds),
        "span": span + (f", steps {steps['first']:,} to {steps['last']:,}" if steps else ""),
        "status": info["status"],
        "caveats": [*_window(scan, options), *_caveats(info)],
        "findings": [*verdict_parts, {"title": "The run", "sentences": general}]
        if general
        else verdict_parts,
        "advice": [f"{advice['sentence']}." for advice in info["advice"]],
        "tables": [
            *summaries(lambda: summary_tables(summary(ds).compute(), ".4e")),
            *_token_tables(computed, ds),
            _array_table(info),
        ],
        "figures": pictures,
        "left_out": left_out,
        **verified(run, check),
        **reproduction(run.name, info),
        "provenance": [
            (name.partition(".")[2], str(value))
            for name, value in settings(info, ["provenance"]).items()
        ],
        "version": __version__,
    }


def _window(scan: Scan, options: Options) -> list[str]:
    """Sentences about the window of steps, if there is one."""
    if options.within:
        alone = f"steps {scan.steps[0]:,} to {scan.steps[-1]:,} alone"
        return [f"All sentences, tables and figures use {alone}."]
    if options.steps is not None:
        return ["The figures show a window of steps; all other numbers describe the whole run."]
    return []


def drawn(
    runs: Sequence[xr.Dataset],
    figures: Sequence[Figure],
    options: Options,
    report: Callable[[int, int], None] | None,
) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
    """Pictures of figures with their titles, and the reason for each figure left out, by name."""
    try:
        collected = collect(runs, figures, options, leave_out=True, report=report)
    except InvalidArgument as error:  # no figure at all, as of a run without rows
        return [], {"all": str(error)}
    made = []
    left_out = dict(collected.left_out)
    for number, figure in enumerate(collected.figures):
        if report is not None:
            report(number, len(collected.figures))
        single = replace(collected, figures=[figure])
        try:
            pictures = _pictures(single)
        except InvalidArgument as error:  # a mean over runs with different steps
            left_out[figure.name] = str(error)
            continue
        made.append({"title": f"{figure.title}: {collected.title}", **pictures})
    return made, left_out


def _pictures(collected: Collected) -> dict[str, Any]:
    """PNG files of one figure in both styles, base64; `wide` if it has several panels."""
    pictures: dict[str, Any] = {}
    for style in ("light", "dark"):
        title = collected.figures[0].title
        canvas = draw_sheet(collected, style=style, title=title, size=_SIZE)
        pictures["wide"] = len(canvas.subfigs) > 1
        if pictures["wide"]:
            canvas = draw_sheet(collected, style=style, title=title)
        content = io.BytesIO()
        canvas.savefig(content, format="png", dpi=_DPI)
        pictures[style] = base64.b64encode(content.getvalue()).decode("ascii")
    return pictures


def _loss(ds: xr.Dataset) -> str:
    if "loss" not in ds:
        return ""
    loss = ds["loss"].dropna("step").compute()
    if not loss.size:
        return ""
    first, last = loss[0], loss[-1]
    return (
        f"The loss was {first.item():.4f} at step {int(first.step):,} and "
        f"{last.item():.4f} at step {int(last.step):,}."
    )


def _caveats(info: Mapping[str, Any]) -> list[str]:
    what_if = RunAttributes.of(info).what_if
    if not what_if:
        return []
    settings = ", ".join(map(str, what_if.get("settings") or [])) or "nothing changed"
    return [f"This is a what-if run ({settings}): {what_if.get('caveat', '')}"]


def summaries(tables: Callable[[], Iterable[Table]]) -> list[dict[str, Any]]:
    """Tables of a summary; the reason if there is none, such as a run without steps."""
    try:
        return [html_table(*table) for table in tables()]
    except (VariableNotRecorded, InvalidArgument) as error:
        return [html_table("Summary", ["not available"], [[str(error)]])]


def _token_tables(computed: Mapping[str, xr.Dataset], ds: xr.Dataset) -> Iterator[dict[str, Any]]:
    if "freezing" in computed:
        rows = [list(row.values()) for row in latest(computed["freezing"], ds, _TOKENS)]
        columns = ["id", "text", "kind", "count in text", "last change", "changed rows"]
        yield html_table("Tokens with the latest change", columns, rows) | {"text": 1}


def _array_table(info: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        [
            name,
            " × ".join(map(str, array["shape"])),
            array["native_dtype"],
            format_bytes(array["bytes_native"]),
            format_bytes(array["bytes_on_disk"]),
        ]
        for name, array in info["arrays"].items()
    ]
    total = ["all", "", "", format_bytes(info["bytes_native"]), format_bytes(info["bytes_on_disk"])]
    return html_table(
        "Stored arrays", ["array", "shape", "type", "native", "on disk"], [*rows, total]
    )


def html_table(title: str, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """A table for the template."""
    return {"title": title, "columns": columns, "rows": rows, "text": None}


def verified(run: Location, check: bool) -> dict[str, Any]:
    """Result of the verification of a run, for the template."""
    if not check:
        nothing = "Not verified. To verify every stored byte, run trajstore report --verify."
        return {"verified": nothing, "problems": []}
    result = verify(run)
    verdict = "sound" if result.clean else f"{len(result.problems):,} problems"
    sentence = (
        f"Every stored byte was compared with its checksum: {verdict}; {result.rows:,} rows, "
        f"{result.shards:,} shards, {result.chunks:,} chunks, {format_bytes(result.bytes)}. "
        "To replay the steps, run trajstore verify --replay."
    )
    return {
        "verified": sentence,
        "problems": [problem.message for problem in result.problems],
    }


def write_runs_report(
    runs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    steps: Steps = None,
    within: bool = False,
    min_unchanged: int = MIN_UNCHANGED,
    check: bool = False,
    overwrite: bool = False,
    report: Callable[[int, int], None] | None = None,
    figures: Iterable[Figure] = tuple(FIGURES.values()),
) -> Path:
    """Write a report that compares runs: one HTML file that loads nothing from the network.

    Parameters
    ----------
    runs : sequence of str
        At least two. Recordings in progress are fine.
    path, steps, within, min_unchanged, check, overwrite, report, figures
        As for `trajstore.analysis.results.report_page.write_report`.

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, RunExists, MissingExtra
        As `trajstore.analysis.results.report_page.write_report`.
    """
    options = Options(steps=steps, within=within, min_unchanged=min_unchanged)
    return write_page(
        path, lambda: _runs_facts(runs, options, check, report, figures), overwrite=overwrite
    )


def _runs_facts(
    runs: Sequence[str],
    options: Options,
    check: bool,
    report: Callable[[int, int], None] | None,
    figures: Iterable[Figure],
) -> dict[str, Any]:
    whole = {run: open_run(run) for run in runs}
    information_of = {run: information(run) | {"final_loss": final_loss(run)} for run in runs}
    attributes = [ds.attrs for ds in whole.values()]
    labels = dict(zip(runs, run_labels(attributes, runs), strict=True))
    differing = list(short_names(attributes, differing_settings(attributes)).values())
    overlaid = [figure for figure in figures if figure.runs.overlays]
    pictures, left_out = drawn(list(whole.values()), overlaid, options, report)
    opened = {
        run: rows_of_window(ds, options.steps) if options.within else ds
        for run, ds in whole.items()
    }
    statuses = Counter(run_status(facts) for facts in information_of.values())
    checked = {run: verified(location(run), check) for run in runs}
    sentences = {run: facts["verified"] for run, facts in checked.items()}
    if len(set(sentences.values())) == 1:
        sentences = {"": next(iter(sentences.values()))}
    return {
        "name": f"{len(runs)} runs",
        "system": run_system(*opened.values()),
        "span": f"They differ in {', '.join(differing) or 'no setting'}",
        "status": ", ".join(f"{number} {status}" for status, number in statuses.items()),
        "caveats": [],
        "findings": [{"title": "Divergence", "sentences": _apart(opened, labels)}],
        "advice": [],
        "tables": [
            html_table("Runs", *run_table(information_of)),
            *summaries(
                lambda: [
                    summary_table({name: summary(ds).compute() for name, ds in opened.items()})
                ]
            ),
        ],
        "figures": pictures,
        "left_out": left_out,
        "verified": " ".join(
            f"{run}: {sentence}" if run else sentence for run, sentence in sentences.items()
        ),
        "problems": [
            f"{run}: {problem}" for run, facts in checked.items() for problem in facts["problems"]
        ],
        "commands": "\n".join(f"trajstore report {shlex.quote(run)}" for run in runs),
        "settings": "",
        "made_of": "The report of each run has the commands that reproduce it:",
        "provenance": [],
        "version": __version__,
    }


def _apart(runs: dict[str, xr.Dataset], labels: dict[str, str]) -> list[str]:
    """One sentence for each run after the first."""
    (name, first), *others = runs.items()
    sentences = []
    for run, ds in others:
        try:
            distances = divergence(first, ds).sel(population="all").compute()
        except (VariableNotRecorded, InvalidArgument) as error:
            sentences.append(f"{labels[run]}: not compared with {name}: {error}.")
            continue
        begin = int(distances["first_difference"])
        if begin < 0:
            sentences.append(f"{labels[run]}: W equals that of {name} at every step, bit for bit.")
            continue
        last = distances.isel(step=-1)
        sentences.append(
            f"{labels[run]}: W differs from that of {name} since step {begin:,}. At step "
            f"{int(last['step']):,}, {last['differing'].item():.1%} of its elements differ; the "
            f"distance is {last['distance'].item():.4g} (L2)."
        )
    return sentences
