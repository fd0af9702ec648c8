"""Commands that look into a run: info, summary, analyze, compare."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich.text import Text

from trajstore.cli.options import (
    COMMON_STEPS,
    JSON,
    LATTICE,
    POPULATIONS,
    RUN,
    opened,
    runs_and_names,
    sentences,
)
from trajstore.cli.progress import AnalysisProgress
from trajstore.cli.tables import (
    err,
    out,
    print_comparison,
    print_description,
    print_information,
    print_json,
    print_notes,
    print_runs,
    print_summary,
    without_tokens,
)
from trajstore.errors import FormatError, InvalidArgument, RunNotFound

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["analyze", "compare", "info", "summary"]


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path())
@JSON
@sentences
def info(runs: tuple[str, ...], as_json: bool) -> None:
    """Tell what a run is: rows, arrays, sizes, configuration, origin. Also while it is recorded.

    Of several runs a table, or a list with --json; what is no run is told, and the exit code is 1.

    \b
    Example:
      trajstore info gatsby.zarr
      trajstore info runs/*.zarr
    """
    from trajstore.store.run_info import information

    if len(runs) == 1:
        facts = information(runs[0])
        if as_json:
            print_json(facts)
        else:
            print_information(runs[0], facts)
        return
    found = {}
    for run in runs:
        try:
            found[run] = information(run)
        except (FormatError, RunNotFound) as error:
            err.print(f"trajstore: {error}")
    if as_json:
        print_json([{"run": run, **facts} for run, facts in found.items()])
    elif found:
        print_runs(found)
    if len(found) < len(set(runs)):
        sys.exit(1)


@click.command()
@RUN
@LATTICE
@POPULATIONS
@JSON
@sentences
def summary(run: str, lattice: str, populations: tuple[str, ...], as_json: bool) -> None:
    """Print the tables of the notebooks: gradients, displacement, centroid, logits, loss.

    \b
    Example:
      trajstore summary gatsby.zarr
      trajstore summary duckling.zarr --lattice bfloat16
      trajstore summary gatsby.zarr --population 'rare=0 < token_count <= 10'
    """
    import analysis
    from trajstore.formats.population_files import populations_from
    from trajstore.store.open_run import open_run

    ds = analysis.with_populations(open_run(run), populations_from(populations))
    facts = analysis.summary(ds, lattice).compute()
    if as_json:
        print_json(
            {
                name: {"dims": list(da.dims), "values": da.values.tolist()}
                for name, da in facts.variables.items()
            }
        )
        return
    if lattice != "native":
        out.print(f"W is rounded to {lattice}.")
    print_summary(facts)


def _list_quantities(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print what `analyze` can be asked for, and end."""
    if not wanted:
        return
    import analysis
    from analysis.registry import ACROSS_RUNS, ALONE

    for name, quantity in (analysis.QUANTITIES | ALONE).items():
        told = (getattr(analysis, name).__doc__ or "").strip().splitlines()[0]
        options = ", ".join(quantity.options)
        out.print(f"{name}  {told}{f' Options: {options}.' if options else ''}")
    for name, function in ACROSS_RUNS.items():
        out.print(f"{name}  {(function.__doc__ or '').splitlines()[0]} Of several runs.")
    ctx.exit()


@click.command()
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_quantities,
    help="List the quantities with their options, and end.",
)
@click.argument("words", nargs=-1, required=True, metavar="RUN… QUANTITY…")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="What to write, streamed: .nc, .zarr, or .csv (a file for each set of dimensions).",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of a single quantity, such as since=previous. Repeatable.",
)
@COMMON_STEPS
@click.option("--by-population", is_flag=True, help="Statistics over each population.")
@LATTICE
@POPULATIONS
@click.option("--scheduler", metavar="ADDRESS", help="A dask cluster to compute on.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@JSON
@sentences
def analyze(
    words: tuple[str, ...],
    output: str | None,
    assignments: tuple[str, ...],
    common_steps: bool,
    by_population: bool,
    lattice: str,
    populations: tuple[str, ...],
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Compute quantities of a run in one pass, and write them or tell what they are like.

    Of several runs, of each of them, along run.

    \b
    Example:
      trajstore analyze --list
      trajstore analyze gatsby.zarr freeze
      trajstore analyze gatsby.zarr grad_norms --by-population -o grad_norms.csv
      trajstore analyze gatsby.zarr displacement --set since=previous -o steps.nc
      trajstore analyze gatsby.zarr grad_norms freeze regimes -o motion.zarr
      trajstore analyze duckling.zarr regimes freeze --lattice bfloat16
      trajstore analyze gatsby.zarr clusters --population 'letters=major(token_text) == "L"'
      trajstore analyze gatsby.zarr pca --population tracers=ids.txt --set population=tracers
      trajstore analyze runs/*.zarr divergence -o divergence.nc
      trajstore analyze gatsby.zarr explain_gradient --set step=50,51 --set token=2 -o why.nc
    """
    import analysis
    from analysis.registry import ACROSS_RUNS, ALONE
    from analysis.token_populations import own_masks
    from analysis.write_results import describe, write_result
    from trajstore.formats.population_files import populations_from

    runs, quantities = runs_and_names(words, {*analysis.QUANTITIES, *ALONE, *ACROSS_RUNS})
    if not quantities:
        raise InvalidArgument(
            "name a quantity after the run, such as freeze; trajstore analyze --list lists them"
        )
    ds = analysis.with_populations(
        opened(runs, common_steps=common_steps), populations_from(populations)
    )
    result = analysis.answer(
        ds, quantities, assignments, by_population=by_population, lattice=lattice
    )
    with AnalysisProgress(scheduler) as progress:
        if output is not None:
            files = write_result(result, output, overwrite=overwrite, report=progress.show)
        else:
            files = []
            facts = describe(result, report=progress.show)
    if output is None and as_json:
        print_json(facts)
    elif output is None:
        print_description(facts)
        sizes = {name: int(mask.sum()) for name, mask in own_masks(ds).items()}
        print_notes(without_tokens(sizes))
    elif as_json:
        print_json({"files": [str(file) for file in files], "variables": [*map(str, result)]})
    else:
        out.print(Text(f"Wrote {', '.join(map(str, files))}: {', '.join(map(str, result))}."))


def _of_common_tokens(first: xr.Dataset, second: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Two runs, with the tokens that both have, where they are not the same.

    Raises
    ------
    InvalidArgument
        If they have none in common.
    """
    import numpy as np

    ids, one, other = np.intersect1d(
        first["token"].values, second["token"].values, return_indices=True
    )
    if np.array_equal(first["token"].values, second["token"].values):
        return first, second
    if not ids.size:
        raise InvalidArgument("these runs have no token in common, so nothing can be compared")
    return first.isel(token=one), second.isel(token=other)


@click.command()
@RUN
@click.argument("other", type=click.Path())
@JSON
@sentences
def compare(run: str, other: str, as_json: bool) -> None:
    """Tell at which step two runs first differ in any bit, in what, and how far they go apart.

    Runs of one content digest hold the same rows, and are not read. Exits with 0 also when they
    differ; scripts read that from --json.

    \b
    Example:
      trajstore compare straight.zarr resumed.zarr
    """
    import numpy as np
    import xarray as xr

    import analysis
    from trajstore.store.fingerprint import CONTENT
    from trajstore.store.open_run import open_run

    first, second = open_run(run), open_run(other)
    tokens = {"first": first.sizes["token"], "second": second.sizes["token"]}
    first, second = _of_common_tokens(first, second)
    found = analysis.compare(first, second)
    digest = first.attrs.get(CONTENT)
    same_content = digest is not None and digest == second.attrs.get(CONTENT)
    if same_content:
        found = xr.zeros_like(found.drop_vars("first_difference")).assign(
            first_difference=("variable", np.full(found.sizes["variable"], -1))
        )
    found = found.compute()
    facts = {
        "same_content": same_content,
        "steps": {"common": found.sizes["step"], "first": first.sizes["step"],
                  "second": second.sizes["step"]},
        "tokens": {"common": first.sizes["token"], **tokens},
        "differing_settings": found.attrs["differing_settings"],
        "only_first": [str(name) for name in first.data_vars if name not in second.data_vars],
        "only_second": [str(name) for name in second.data_vars if name not in first.data_vars],
        "variables": {
            str(name): {
                "first_difference": int(found.first_difference[at]),
                "differing_steps": int(found.differs[:, at].sum()),
                "distance": found.distance[:, at].values.tolist(),
            }
            for at, name in enumerate(found["variable"].values)
        },
        "step": found.step.values.tolist(),
    }  # fmt: skip
    if as_json:
        print_json(facts)
    else:
        print_comparison(facts)
