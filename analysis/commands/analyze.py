"""The command `analyze`, and options that it shares with `plot` and `report`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import click

from trajstore.cli.command_options import (
    COMMON_STEPS,
    JSON,
    LATTICE,
    POPULATIONS,
    SELECT,
    given_populations,
    opened,
    runs_and_names,
)
from trajstore.cli.output import (
    AnalysisProgress,
    out,
    print_json,
    print_notes,
    print_table,
    without_tokens,
)
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import MIN_UNCHANGED, RECORDED

if TYPE_CHECKING:
    import xarray as xr


OF_WHOLE_RUN = "Values of selected steps are still those of the whole run."
"""Note of ``--select`` in commands that have ``--within``."""

WITHIN = click.option(
    "--within",
    is_flag=True,
    help="Compute from the selected steps only, as if the run had no other steps.",
)
UNCHANGED = click.option(
    "--min-unchanged",
    type=click.IntRange(1),
    help="A token is frozen if at least this many final steps leave it unchanged; "
    f"default: {MIN_UNCHANGED}.",
)
VECTORS = click.option(
    "--vectors",
    metavar="NAME|NAME:POPULATION",
    help="Use other vectors in place of W: grad, exp_avg, exp_avg_sq or delta of each token, "
    "hidden_mean, or centroid or largest_cluster of a population, such as centroid:all.",
)
PARAMETER = click.option(
    "--parameter",
    metavar="NAME",
    help="Use the rows of this parameter of a run with everything in place of the tokens of W; "
    "`info` lists the names.",
)


def of_parameter(ds: xr.Dataset, name: str | None) -> xr.Dataset:
    """The history of a parameter; without a name, the run itself."""
    from trajstore.store.reading.run_attributes import parameter_dataset

    return ds if name is None else parameter_dataset(ds, name)


def _list_quantities(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print the quantities that `analyze` computes, and exit."""
    if not wanted:
        return
    from trajstore import analysis
    from trajstore.analysis.several_quantities import ACROSS_RUNS, ALONE

    for name, quantity in sorted((analysis.QUANTITIES | ALONE).items()):
        summary = (quantity.function.__doc__ or "").strip().splitlines()[0]
        options = ", ".join(quantity.options)
        out.print(f"{name}  {summary}{f' Options: {options}.' if options else ''}")
    for name, function in ACROSS_RUNS.items():
        out.print(f"{name}  {(function.__doc__ or '').splitlines()[0]} Requires several runs.")
    ctx.exit()


@click.command()
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_quantities,
    help="List the quantities with their options, and exit.",
)
@click.argument("words", nargs=-1, required=True, metavar="RUN... QUANTITY...")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="File to write: .nc (extra hdf5), .zarr, .safetensors, or .csv (one file per set of "
    "dimensions, or one table beside a recorded variable).",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of a single quantity, such as since=previous. Repeatable.",
)
@SELECT(
    "step",
    "token",
    "row",
    "population",
    note=f"{OF_WHOLE_RUN} With token, all values are computed from these tokens only.",
)
@WITHIN
@UNCHANGED
@PARAMETER
@VECTORS
@COMMON_STEPS
@click.option("--by-population", is_flag=True, help="Compute statistics of each population.")
@LATTICE
@POPULATIONS
@click.option("--scheduler", metavar="ADDRESS", help="Compute on the dask cluster at this address.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@JSON
def analyze(
    words: tuple[str, ...],
    output: str | None,
    parameter: str | None,
    common_steps: bool,
    populations: tuple[str, ...],
    selected: dict[str, Any],
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute quantities of a run in one pass. Write them, or print a summary.

    With several runs, the results have the dimension run. Beside a recorded variable, such as loss,
    the result is a table of one line per step, with a column for each population.

    \b
    Example:
      trajstore analyze --list
      trajstore analyze gatsby.zarr freeze
      trajstore analyze gatsby.zarr freeze --select step=100:200 --within --min-unchanged 10
      trajstore analyze gatsby.zarr grad_norms --by-population -o grad_norms.csv
      trajstore analyze gatsby.zarr displacement --set since=previous -o steps.nc
      trajstore analyze gatsby.zarr grad_norms freeze regimes -o motion.zarr
      trajstore analyze gatsby.zarr loss lr freeze distinct -o steps.csv
      trajstore analyze gatsby.zarr freeze centroid -o for-scripts.safetensors
      trajstore analyze duckling.zarr regimes freeze --lattice bfloat16
      trajstore analyze gatsby.zarr autocorrelation --vectors hidden_mean
      trajstore analyze whole.zarr freeze --parameter transformer.h.0.mlp.c_fc.weight
      trajstore analyze gatsby.zarr clusters --population 'letters=major(token_text) == "L"'
      trajstore analyze gatsby.zarr pca --population tracers=ids.txt --set population=tracers
      trajstore analyze gatsby.zarr nearest_tokens --set tokens=101 --set steps=0,300 -o near.csv
      trajstore analyze runs/*.zarr divergence -o divergence.nc
      trajstore analyze gatsby.zarr explain_gradient --set step=50,51 --set token=2 -o why.nc
    """
    from trajstore import analysis
    from trajstore.analysis.results.write_results import (
        check_result_target,
        describe,
        write_result,
    )
    from trajstore.analysis.several_quantities import ACROSS_RUNS, ALONE, compute_named
    from trajstore.exchange.selection import select_part
    from trajstore.populations import own_masks

    if output is not None:
        check_result_target(output, overwrite=overwrite)
    known = {*analysis.QUANTITIES, *ALONE, *ACROSS_RUNS, *RECORDED}
    runs, quantities = runs_and_names(words, known)
    if not quantities:
        raise InvalidArgument(
            "no quantity given; add one after the run, such as freeze (trajstore analyze --list)"
        )
    ds = analysis.with_populations(
        of_parameter(opened(runs, common_steps=common_steps), parameter),
        given_populations(populations),
    )
    ds = select_part(ds, tokens=selected.get("tokens"))
    result = compute_named(ds, quantities, steps=selected.get("steps"), **options)
    result = _of_populations(result, selected.get("population"))
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
        if "steps" in selected and not options["within"]:
            print_notes(
                ["values are those of the whole run; --within uses the selected steps only"]
            )
    elif as_json:
        print_json({"files": [str(file) for file in files], "variables": [*map(str, result)]})
    else:
        out.print(f"Wrote {', '.join(map(str, files))}: {', '.join(map(str, result))}.")


def _of_populations(result: xr.Dataset, names: str | None) -> xr.Dataset:
    """Return the part of a result that belongs to these populations.

    Raises
    ------
    InvalidArgument
        If the result has no populations, or none of that name.
    """
    if names is None:
        return result
    if "population" not in result.dims:
        raise InvalidArgument(
            f"got --select population={names}, but this result has no populations; leave it out, "
            "add --by-population, or select tokens: --select token=dead"
        )
    known = result["population"].values.tolist()
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise InvalidArgument(
                f"there is no population {name!r}{did_you_mean(name, known)}; choose from "
                f"{', '.join(known)}"
            )
    return result.sel(population=chosen)


def print_description(facts: dict[str, Any]) -> None:
    """Print the result of `describe`, one line per population."""
    rows, flags = [], []
    for name, fact in facts.items():
        parts = {f"{name} {population}": part for population, part in fact["populations"].items()}
        dims = {d: size for d, size in fact["sizes"].items() if not (parts and d == "population")}
        sizes = " × ".join(f"{dim} {size}" for dim, size in dims.items())
        for row, part in (parts or {name: fact}).items():
            shown = part["min"] == part["min"] or not part["flags"]
            numbers = (f"{part[key]:.6g}" if shown else "" for key in ("min", "mean", "max"))
            rows.append((row, sizes, *numbers, str(part["nan"]), fact["units"]))
            flags += [
                (row, meaning, f"{count:,} of {part['size']:,}", f"{count / part['size']:.1%}")
                for meaning, count in part["flags"].items()
                if count
            ]
    print_table("", ("variable", "dimensions", "min", "mean", "max", "NaN", "units"), rows)
    if flags:
        columns = ("variable", "value", "count", "fraction")
        print_table("Categories and special values", columns, flags, words=(0, 1))
    for name, fact in facts.items():
        if "values" in fact:
            _print_values(name, fact)
    ranked = [name for name, fact in facts.items() if "rank" in fact["sizes"]]
    left = [n for n in ranked if not facts[n]["populations"] and "values" not in facts[n]]
    if left:
        print_notes([f"-o FILE.csv writes the values of {', '.join(left)}, too many to print"])


def _print_values(name: str, fact: dict[str, Any]) -> None:
    """Print a table of counts or of a ranking. Its columns are the labels of the last dimension."""
    import numpy as np

    labels, texts = fact["labels"], fact.get("texts")
    *dims, last = labels
    form = "{}" if last == "rank" else "{:,}"
    cells = [
        f"{value:.6g}" if isinstance(value, float) else form.format(value)
        for value in np.ravel(fact["values"]).tolist()
    ]
    if texts is not None:
        named = np.ravel(np.array(texts, object))
        cells = [f"{cell} '{text}'" for cell, text in zip(cells, named, strict=True)]
    lines = np.reshape(np.array(cells, object), (-1, len(labels[last])))
    of_lines = itertools.product(*(labels[dim] for dim in dims))
    rows = [(*of_line, *line) for of_line, line in zip(of_lines, lines, strict=True)]
    print_table(name, (*dims, *labels[last]), rows, words=(0, *range(len(dims))))
