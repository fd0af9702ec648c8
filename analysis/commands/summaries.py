"""The commands that describe runs: `summary`, `compare`, `report` and `explore`."""

from __future__ import annotations

import math
import re
import signal
import sys
import webbrowser
from typing import TYPE_CHECKING, Any

import click

from trajstore.analysis.commands.analyze import OF_WHOLE_RUN, UNCHANGED, WITHIN
from trajstore.cli.command_options import (
    JSON,
    LATTICE,
    POPULATIONS,
    RUN,
    RUNS,
    SELECT,
    file_stem,
    given_populations,
    without_none,
)
from trajstore.cli.output import (
    AnalysisProgress,
    counted,
    out,
    print_json,
    print_notes,
    print_table,
    recorded_notes,
    without_tokens,
)
from trajstore.errors import InvalidArgument

if TYPE_CHECKING:
    import xarray as xr


@click.command()
@RUNS
@LATTICE
@POPULATIONS
@JSON
def summary(
    runs: tuple[str, ...], lattice: str, populations: tuple[str, ...], as_json: bool
) -> None:
    """Print gradients, displacement, centroid, logits and loss at the first and last step.

    Also prints the notes of the recording: what the run does not hold, or not as the loop suggests;
    and what the encoding compact stores in place of computing it, and why.
    For several runs or a folder of runs, prints one table with a line per run, or a list with
    --json.

    \b
    Example:
      trajstore summary gatsby.zarr
      trajstore summary duckling.zarr --lattice bfloat16
      trajstore summary gatsby.zarr --population 'rare=0 < token_count <= 10'
      trajstore summary runs/
    """
    from trajstore import analysis
    from trajstore.analysis.results.summary import summary_table
    from trajstore.store.metadata.zarr_json import notes_of
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.run_attributes import run_labels
    from trajstore.store.reading.run_info import information, run_paths
    from trajstore.store.writing.new_run import fallbacks

    given = given_populations(populations)
    paths = run_paths(runs)
    opened = [analysis.with_populations(open_run(path), given) for path in paths]
    summaries = [analysis.summary(ds, lattice).compute() for ds in opened]
    if as_json:
        listed = [
            {
                str(name): {"dims": list(da.dims), "values": da.values.tolist()}
                for name, da in facts.variables.items()
            }
            for facts in summaries
        ]
        if len(paths) > 1:
            print_json([{"run": path, **facts} for path, facts in zip(paths, listed, strict=True)])
        else:
            print_json(listed[0])
        return
    if lattice != "native":
        out.print(f"W is rounded to {lattice}.")
    if len(paths) == 1:
        print_summary(summaries[0])
        print_notes(recorded_notes(notes_of(opened[0].attrs)))
        print_notes(fallbacks(information(paths[0])))
        return
    labels = run_labels([ds.attrs for ds in opened], paths)
    print_table(*summary_table(dict(zip(labels, summaries, strict=True))), fold=True)
    runs_of: dict[str, list[str]] = {}
    for label, path, ds in zip(labels, paths, opened, strict=True):
        notes = [note["note"] for note in notes_of(ds.attrs)]
        for note in [*notes, *fallbacks(information(path))]:
            runs_of.setdefault(note, []).append(label)
    print_notes(
        f"{note} ({named[0] if len(named) == 1 else counted(len(named), 'run')})"
        for note, named in runs_of.items()
    )


def print_summary(summary: xr.Dataset) -> None:
    """Print the computed result of `analysis.summary`."""
    from trajstore.analysis.results.summary import summary_tables, tokens_of

    tokens = tokens_of(summary)
    for title, columns, rows in summary_tables(summary, ".6e"):
        print_table(title, columns, rows)
    if "max_dead_grad_norm" in summary:
        largest = summary["max_dead_grad_norm"].item()
        if not tokens["dead"]:
            out.print("There are no dead tokens: every token occurs in the corpus.")
        elif largest == 0:
            out.print("Dead token gradients are EXACTLY ZERO: only weight decay can move them.")
        else:
            out.print(f"Dead token gradients are NON-ZERO, at most {largest:.6e} at any step.")
    first, last = summary["when_step"].values.tolist()
    if "logits" in summary:
        names = summary["logit_statistic"].values
        values = (
            f"{name} {value:.4f}"
            for name, value in zip(names, summary["logits"].values, strict=True)
        )
        out.print(f"Logits at step {first}: {', '.join(values)}")
    if "loss" in summary:
        before, after = summary["loss"].values
        begin = f"{before:.4f} at step {first}, " if first != last else ""
        out.print(f"Loss: {begin}{after:.4f} at step {last}")
    print_notes(without_tokens({n: tokens[n] for n in tokens if n not in ("dead", "live", "all")}))
    if "dead" not in tokens:
        out.print("Dead tokens are not labeled; label them with trajstore annotate.")


_SETTINGS = 12  # maximum differing settings to print


class _Percentage(click.ParamType[float]):
    """A percentage, as a fraction."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Parse a text such as 1%."""
        percentage = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", str(value))
        if percentage is None:
            self.fail(f"got {value!r}, expected a percentage such as 1%")
        return float(percentage[1]) / 100


@click.command()
@RUN
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "--over",
    type=_Percentage(),
    metavar="PERCENT",
    help="Print from which step on the losses differ by more than this, such as 1%.",
)
@JSON
def compare(run: str, other: str | None, over: float | None, as_json: bool) -> None:
    """Print the first step at which two runs differ in any bit, where, and how far they diverge.

    Runs with the same content digest hold the same rows and are not read. Exits with 0 even if the
    runs differ; scripts can read the result from --json. Without a second run, compares the two
    matrices that a training with untied weights recorded under one name.

    \b
    Example:
      trajstore compare straight.zarr resumed.zarr
      trajstore compare gatsby.zarr slower.zarr --over 1%
      trajstore compare untied.zarr
    """
    import xarray as xr

    from trajstore import analysis
    from trajstore.store.metadata.metadata_form import CONTENT
    from trajstore.store.reading.open_run import open_run
    from trajstore.store.reading.run_info import run_paths

    paths = run_paths([run]) if other is None else [run, other]
    if len(paths) != 2:
        raise InvalidArgument(f"got {', '.join(paths)}, expected two runs; name both")
    first, second = map(open_run, paths)
    tokens = {"first": first.sizes["token"], "second": second.sizes["token"]}
    first, second = _of_common_tokens(first, second)
    differences_of_runs = analysis.compare(first, second, over)
    digest = first.attrs.get(CONTENT)
    same_content = digest is not None and digest == second.attrs.get(CONTENT)
    if same_content:  # equal, without reading
        differences_of_runs = xr.zeros_like(differences_of_runs)
        for name in {"first_difference", "first_over"} & set(differences_of_runs):
            differences_of_runs[name] = differences_of_runs[name] - 1
    differences_of_runs = differences_of_runs.compute()
    facts = {
        "same_content": same_content,
        "steps": {"common": differences_of_runs.sizes["step"], "first": first.sizes["step"],
                  "second": second.sizes["step"]},
        "tokens": {"common": first.sizes["token"], **tokens},
        "differing_settings": differences_of_runs.attrs["differing_settings"],
        "only_first": [str(name) for name in first.data_vars if name not in second.data_vars],
        "only_second": [str(name) for name in second.data_vars if name not in first.data_vars],
        "variables": {
            str(name): {
                "first_difference": int(differences_of_runs.first_difference[at]),
                "differing_steps": int(differences_of_runs.differs[:, at].sum()),
                "distance": differences_of_runs.distance[:, at].values.tolist(),
            }
            for at, name in enumerate(differences_of_runs["variable"].values)
        },
        "step": differences_of_runs.step.values.tolist(),
    }  # fmt: skip
    if over is not None:
        differences = differences_of_runs.loss_difference.values
        facts["loss"] = {
            "over": over,
            "first_over": int(differences_of_runs.first_over),
            "steps_over": int((differences > over).sum()),
            "difference": differences.tolist(),
        }
    if as_json:
        print_json(facts)
    else:
        print_comparison(facts)


def _of_common_tokens(first: xr.Dataset, second: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Restrict two runs to their common tokens.

    Raises
    ------
    InvalidArgument
        If they have no common token.
    """
    import numpy as np

    ids, in_first, in_second = np.intersect1d(
        first["token"].values, second["token"].values, return_indices=True
    )
    if np.array_equal(first["token"].values, second["token"].values):
        return first, second
    if not ids.size:
        raise InvalidArgument("the runs have no common token; compare runs with common token ids")
    return first.isel(token=in_first), second.isel(token=in_second)


def _print_loss(loss: dict[str, Any], steps: list[int]) -> None:
    at, over = loss["first_over"], f"{loss['over']:.6%}".rstrip("%").rstrip("0").rstrip(".")
    known = [(value, step) for value, step in zip(loss["difference"], steps, strict=True)
             if math.isfinite(value)]  # fmt: skip
    most = f"{max(known)[0]:.3%} at step {max(known)[1]:,}" if known else "unknown"
    if at < 0:
        out.print(f"The losses never differ by more than {over}%; the largest difference: {most}.")
        return
    since = sum(step >= at for step in steps)
    out.print(
        f"The losses differ by more than {over}% from step {at:,} on, at {loss['steps_over']:,} of "
        f"{counted(since, 'step')}; the largest difference: {most}."
    )


def print_comparison(facts: dict[str, Any]) -> None:
    """Print the result of `analysis.compare`."""
    common, first, second = (facts["steps"][key] for key in ("common", "first", "second"))
    differing = [name for name, fact in facts["variables"].items() if fact["differing_steps"]]
    verdict = f"differ in {', '.join(differing)}" if differing else "are identical, bit for bit"
    unread = " according to their content digests; no row was read (`trajstore verify` reads all)"
    out.print(
        f"Over {counted(common, 'common step')} and "
        f"{counted(len(facts['variables']), 'common variable')}, the runs {verdict}"
        f"{unread if facts['same_content'] else ''}."
    )
    tokens = facts["tokens"]
    if not tokens["common"] == tokens["first"] == tokens["second"]:
        out.print(
            f"The first run has {tokens['first']:,} tokens, the second {tokens['second']:,}; only "
            f"the {tokens['common']:,} common tokens are compared."
        )
    if not common == first == second:
        out.print(f"The first run has {counted(first, 'row')}, the second {second:,}.")
    for which in ("first", "second"):
        if facts[f"only_{which}"]:
            out.print(f"Only the {which} run has {', '.join(facts[f'only_{which}'])}.")
    if "loss" in facts:
        _print_loss(facts["loss"], facts["step"])
    if facts["differing_settings"]:
        named, more = facts["differing_settings"][:_SETTINGS], ""
        if len(facts["differing_settings"]) > _SETTINGS:
            more = f" and {len(facts['differing_settings']) - _SETTINGS} others (--json)"
        out.print(f"Their settings differ in {', '.join(named)}{more}.")
    if not differing:
        return
    rows = []
    for name in differing:
        fact = facts["variables"][name]
        distance = fact["distance"]
        at = facts["step"].index(fact["first_difference"])
        finite = [value for value in distance if math.isfinite(value)]
        shown = (distance[at], max(finite, default=math.nan), distance[-1])
        steps = (fact["first_difference"], fact["differing_steps"])
        rows.append((name, *steps, *(f"{value:.6g}" for value in shown)))
    columns = ("first differing step", "differing steps", "distance at first", "largest", "at last")
    print_table("", ("variable", *columns), rows)


@click.command()
@RUNS
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="File to write; default: RUN.html, or runs.html for several runs.",
)
@SELECT("step", note=OF_WHOLE_RUN)
@WITHIN
@UNCHANGED
@click.option(
    "--verify", "check", is_flag=True, help="Verify every stored byte and report the result."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
def report(
    runs: tuple[str, ...], output: str | None, selected: dict[str, Any], **options: Any
) -> None:
    """Write an HTML report on a run: main results, tables, figures, and how to reproduce it.

    The report is a single file that loads nothing from the network. For several runs or a
    folder of runs, it compares them.

    \b
    Example:
      trajstore report gatsby.zarr
      trajstore report gatsby.zarr --verify -o gatsby.html
      trajstore report runs/
    """
    from trajstore.analysis.results.report_page import write_report, write_runs_report
    from trajstore.store.reading.run_info import run_paths

    paths = run_paths(runs)
    target = output or f"{file_stem(runs, paths)}.html"
    with AnalysisProgress() as progress:
        how = without_none(options) | selected | {"report": progress.show}
        if len(paths) == 1:
            written = write_report(paths[0], target, **how)
        else:
            written = write_runs_report(paths, target, **how)
    out.print(f"Wrote {written}.")


@click.command()
@RUN
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. The default allows connections from this machine only.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=5006,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--open", "browse", is_flag=True, help="Open the page in a browser.")
def explore(run: str, host: str, port: int, browse: bool) -> None:
    """Show a run in a browser: token positions per step, heatmap, curves, single tokens.

    Reads the run and serves its page until Ctrl-C. Works during recording: new rows appear
    automatically. The page loads nothing from the network.

    \b
    Example:
      trajstore explore gatsby.zarr
      trajstore explore gatsby.zarr --port 0 --open
    """
    from trajstore.analysis.exploring.page import LiveRun
    from trajstore.analysis.exploring.server import address, check_panel, free_port, serving

    check_panel()
    port = free_port(host, port)
    with AnalysisProgress() as progress:
        live = LiveRun(run, progress.show)
    with live, serving(live, host, port) as serve:
        out.print(f"Serving {run} at {address(host, port)} until Ctrl-C.")
        if browse:
            webbrowser.open(address(host, port))
        number = serve()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
