"""The page: facts, verdicts, tables and figures of a run, in one file."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.analysis.figures import FIGURES, Collected, Figure, Options, collect, draw_sheet
from trajstore.analysis.figures.figure import compute_together, prepared
from trajstore.analysis.figures.titles import run_system
from trajstore.analysis.motion.unchanged import MIN_UNCHANGED
from trajstore.analysis.report.reproduction import reproduction
from trajstore.analysis.report.verdicts import evidence, latest, seam_verdict, verdicts
from trajstore.analysis.results.run_summary import summary
from trajstore.analysis.scan.scan import Scan
from trajstore.byte_sizes import format_bytes
from trajstore.errors import InvalidArgument, MissingExtra, RunExists, VariableNotRecorded
from trajstore.integrity.verify import verify
from trajstore.populations.masks import populations
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.run_info import information
from trajstore.store.storage.remote_path import Location, RunPath, local_path, location
from trajstore.store.writing.create import staged_file
from trajstore.version import __version__

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps

__all__ = ["check_target", "drawn", "html_table", "verified", "write_page", "write_report"]

_DPI = 110
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
) -> Path:
    """Write a page about a run: one file of HTML, which asks nothing of the network.

    Parameters
    ----------
    run : path-like, str or RemotePath
        Also one that is being recorded.
    path : path-like
        Of the page; ends in ``.html``.
    steps : str, int, slice or iterable of int, optional
        Window that the figures show, as for `analysis.compute`. Sentences and tables are about the
        whole run.
    within : bool
        Have the whole page be about the rows of the window, as if the run had no others.
    min_unchanged : int
        Steps without motion that make a token frozen, as for `analysis.freeze`.
    check : bool
        Verify every stored byte, and say so on the page; by default it says that nothing was.
    overwrite : bool
        Replace a page that is there.
    report : callable, optional
        Told of tasks done and in all.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    InvalidArgument, RunExists
        For another ending; if the page is there.
    MissingExtra
        Without Jinja2 or matplotlib.
    """
    options = Options(steps=steps, within=within, min_unchanged=min_unchanged)

    def facts() -> dict[str, Any]:
        return _facts(location(run), options, check, report)

    return write_page(path, facts, overwrite=overwrite)


def write_page(
    path: str | os.PathLike[str], facts: Callable[[], Mapping[str, Any]], *, overwrite: bool
) -> Path:
    """Fill the template with facts, which are asked for when the page can be written.

    Raises
    ------
    InvalidArgument, RunExists, MissingExtra
        As `write_report`.
    """
    template = _template()
    target = local_path(path)
    check_target(target, overwrite=overwrite)
    html = template.render(**facts())
    with staged_file(target, overwrite=overwrite) as new:
        new.write_text(html, "utf-8")
    return target


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a page that cannot be written.

    Raises
    ------
    InvalidArgument, RunExists
    """
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidArgument(f"a report is a page of HTML; got {target}, expected NAME.html")
    if target.exists() and not overwrite:
        raise RunExists(
            f"{target} is already there; choose another name, or overwrite it (--overwrite)"
        )


def seen(text: object) -> str:
    """Text whose control characters are shown, and do nothing.

    >>> seen("a\\x1b[31mb\\n")
    'a␛[31mb\\n'
    """
    shown = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)}
    ranges = ((0x7F, 0xA0), (0x200E, 0x2010), (0x202A, 0x202F), (0x2066, 0x206A))
    hidden = {code: f"\\u{code:04x}" for first, stop in ranges for code in range(first, stop)}
    return str(text).translate(shown | hidden)


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtra("reports need Jinja2; install trajstore[report]") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["seen"] = seen
    return environment.from_string(
        files("trajstore.analysis.report").joinpath("page.html").read_text()
    )


def _facts(
    run: Location, options: Options, check: bool, report: Callable[[int, int], None] | None
) -> dict[str, Any]:
    info = information(run)
    ds = open_run(run)
    alone = [figure for figure in FIGURES.values() if not figure.between]
    pictures, left_out = drawn([ds], alone, options, report)
    scan = prepared(ds, [FIGURES["freeze"]], options).without_window()
    ds = scan.ds
    lazy, unknown = evidence(scan, options.min_unchanged)
    found = dict(zip(lazy, compute_together(list(lazy.values())), strict=True))
    names, groups = populations(scan.ds)
    sizes = {name: int(group.sum()) for name, group in zip(names, groups, strict=True)}
    verdict_parts = [
        {"title": f"{number:,} {name.replace('_', ' ')} tokens", "sentences": sentences}
        for name, number in sizes.items()
        if number and (name != "all" or len(sizes) == 1)
        if (sentences := verdicts(found, name, options.min_unchanged))
    ]
    general = [sentence for sentence in (_loss(ds), seam_verdict(found)) if sentence]
    general += [f"Not told: {name}, for {why}." for name, why in unknown.items()]
    steps = info["steps"]
    span = f"{info['committed_rows']:,} rows"
    return {
        "name": run.name,
        "system": run_system(ds),
        "span": span + (f", steps {steps['first']:,} to {steps['last']:,}" if steps else ""),
        "status": info["status"],
        "caveats": [*_window(scan, options), *_caveats(info)],
        "told": [*verdict_parts, {"title": "The run", "sentences": general}]
        if general
        else verdict_parts,
        "advice": [f"{advice['sentence']}." for advice in info["advice"]],
        "tables": [*_summary_tables(ds), *_token_tables(found, ds), _array_table(info)],
        "figures": pictures,
        "left_out": left_out,
        **verified(run, check),
        **reproduction(run.name, info),
        "provenance": list(_flat(info.get("provenance") or {})),
        "version": __version__,
    }


def _window(scan: Scan, options: Options) -> list[str]:
    """What of the page is about some of the steps only."""
    if options.within:
        alone = f"steps {scan.steps[0]:,} to {scan.steps[-1]:,} alone"
        return [f"All sentences, tables and figures are computed from {alone}."]
    if options.steps is not None:
        return ["The figures show some of the steps; every number is that of the whole run."]
    return []


def drawn(
    runs: Sequence[xr.Dataset],
    figures: Sequence[Figure],
    options: Options,
    report: Callable[[int, int], None] | None,
) -> tuple[list[dict[str, str]], Mapping[str, str]]:
    """Pictures of figures, each with its title, and by name those that cannot be drawn, and why."""
    try:
        found = collect(runs, figures, options, leave_out=True, report=report)
    except InvalidArgument as error:  # none of them: a run that has just begun
        return [], {"all": str(error)}
    made = []
    left_out = dict(found.left_out)
    for figure in found.figures:
        one = replace(found, figures=[figure])
        try:
            pictures = {style: _picture(one, style) for style in ("light", "dark")}
        except InvalidArgument as error:  # a mean of runs with different steps
            left_out[figure.name] = str(error)
            continue
        made.append({"title": f"{figure.title}: {found.title}", **pictures})
    return made, left_out


def _picture(one: Collected, style: str) -> str:
    content = io.BytesIO()
    draw_sheet(one, style=style).savefig(content, format="png", dpi=_DPI)
    return base64.b64encode(content.getvalue()).decode("ascii")


def _loss(ds: xr.Dataset) -> str:
    if "loss" not in ds:
        return ""
    loss = ds["loss"].dropna("step").compute()
    if not loss.size:
        return ""
    first, last = loss[0], loss[-1]
    return (
        f"The loss was {first.item():.4f} at step {int(first.step):,}, and "
        f"{last.item():.4f} at step {int(last.step):,}."
    )


def _caveats(info: Mapping[str, Any]) -> list[str]:
    what_if = (info.get("provenance") or {}).get("what_if") or {}
    if not what_if:
        return []
    settings = ", ".join(map(str, what_if.get("settings") or [])) or "nothing changed"
    return [f"This is a what-if run ({settings}): {what_if.get('caveat', '')}"]


def _summary_tables(ds: xr.Dataset) -> Iterator[dict[str, Any]]:
    try:
        facts = summary(ds).compute()
    except (VariableNotRecorded, InvalidArgument) as error:
        yield html_table("Summary", ["there is none"], [[str(error)]])
        return
    statistics = ["mean", "median", "min", "max"]
    names = [str(name) for name in facts["population"].values]
    sizes = dict(zip(names, facts["population_tokens"].values.tolist(), strict=True))
    if "grad_norms" in facts:
        rows = [
            [f"{name} ({sizes[name]:,})", str(step)]
            + [
                f"{facts['grad_norms'].sel(population=name, when=when, statistic=each).item():.4e}"
                for each in statistics
            ]
            for name in names
            for when, step in zip(("first", "last"), facts["when_step"].values, strict=True)
        ]
        yield html_table("Gradient norms (L2)", ["tokens", "step", *statistics], rows)
    first, last = facts["state_step"].values.tolist()
    rows = [
        [f"{name} ({sizes[name]:,})"]
        + [
            f"{facts['displacement'].sel(population=name, statistic=each).item():.4e}"
            for each in statistics
        ]
        + [f"{value:.6f}" for value in facts["centroid_norm"].sel(population=name).values]
        for name in names
    ]
    columns = [*statistics, f"centroid at {first}", f"centroid at {last}"]
    yield html_table(f"Displacement from step {first} to {last}", ["tokens", *columns], rows)


def _token_tables(found: Mapping[str, xr.Dataset], ds: xr.Dataset) -> Iterator[dict[str, Any]]:
    if "rest" in found:
        rows = [list(row.values()) for row in latest(found["rest"], ds, _TOKENS)]
        columns = ["id", "text", "kind", "in the text", "last motion", "rows with motion"]
        yield html_table("The tokens that moved longest", columns, rows) | {"text": 1}


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
        "What is stored", ["array", "shape", "type", "native", "on disk"], [*rows, total]
    )


def html_table(title: str, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
    """A table as the template takes it."""
    return {"title": title, "columns": columns, "rows": rows, "text": None}


def verified(run: Location, check: bool) -> dict[str, Any]:
    """What the page says of the stored bytes of a run."""
    if not check:
        nothing = "Nothing was verified for this page; trajstore report --verify does it."
        return {"verified": nothing, "problems": []}
    found = verify(run)
    verdict = "and is sound" if found.clean else f"with {len(found.problems):,} problems"
    said = (
        f"Every stored byte was held against its checksum, {verdict}: {found.rows:,} rows, "
        f"{found.shards:,} shards, {found.chunks:,} chunks, {format_bytes(found.bytes)}. The steps "
        "were not replayed; trajstore verify --replay does that."
    )
    return {"verified": said, "problems": [problem.message for problem in found.problems]}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(item)
