"""`compute`: several quantities in one pass, by name, with options as text too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xarray as xr

from trajstore.analysis.motion.vectors import vectors_named
from trajstore.analysis.scan.input_checks import RUN, require_variables
from trajstore.analysis.scan.quantity import Quantity, every_quantity, quantities_of_one_pass
from trajstore.analysis.scan.result_variables import (
    NO_ROW_BEFORE,
    by_population,
    category_counts,
    is_category,
    with_flag,
)
from trajstore.analysis.scan.scan import Scan, rows_of_window, windowed_scan
from trajstore.analysis.several_runs import over_runs
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.populations import check_dataset, errors_about_rows, named_as_rows
from trajstore.schema import RECORDED

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps

__all__ = ["QUANTITIES", "compute"]

QUANTITIES: dict[str, Quantity] = quantities_of_one_pass()
"""Quantities by name. `trajstore.analysis.compute` computes them together in one pass."""

ALONE = {name: quantity for name, quantity in every_quantity().items() if quantity.alone}
"""Quantities that are only computed separately, because they require their own options."""

ACROSS_RUNS: dict[str, Callable[..., Any]] = {
    name: quantity.function for name, quantity in every_quantity().items() if quantity.across_runs
}
"""Functions of several runs together. `QUANTITIES` apply to each run."""


def compute(
    ds: xr.Dataset,
    names: Sequence[str],
    lattice: str = "native",
    *,
    steps: Steps = None,
    within: bool = False,
    min_unchanged: int | None = None,
) -> xr.Dataset:
    """Compute several quantities in one pass: each chunk is read once.

    The result is lazy. Load or write the whole result to run the single pass.

    Parameters
    ----------
    ds : Dataset
        A run.
    names : sequence of str
        Names in `QUANTITIES`, computed with default options, and recorded variables, such as
        ``loss``.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type for quantities that have this option. Others use W unchanged.
    steps : str, int, slice or iterable of int, optional
        A window: return only these steps, such as ``"100:200"``. The values are those of the whole
        run, except for quantities with `Quantity.of_window`.
    within : bool
        Compute everything from the rows of the window only.
    min_unchanged : int, optional
        For quantities that have this option.

    Returns
    -------
    Dataset
        The results of all functions. A DataArray has the name of its function; the variables of a
        Dataset keep their names. All have every step of `ds`, or of the window. Steps without a
        value, such as a first row without a previous row, are NaN in floats, −1 in integers and
        False in flags. With a recorded variable, the result is a table of one line per step: it
        has only the variables along step, and one for each population, such as ``distinct_dead``.

    Raises
    ------
    InvalidArgument
        If a name is unknown, no name is given, the lattice is unknown, no quantity has a given
        option, or one has no value per step beside a recorded variable.
    VariableNotRecorded
        If the run does not hold a required variable.

    Examples
    --------
    >>> result = compute(ds, ["grad_norms", "speed", "logit_stats"]).compute()
    >>> list(result)[:4]
    ['grad_norms', 'speed', 'logit_min', 'logit_max']
    >>> list(compute(ds, ["loss", "freeze"]).to_dataframe().columns)[:3]
    ['loss', 'unchanged_fraction_dead', 'unchanged_fraction_live']
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"got {names!r}, expected names of quantities, such as 'freeze'")
    names = list(names)
    alone = [name for name in names if name in ALONE]
    if alone:
        raise InvalidArgument(
            f"{alone[0]} requires its own options; compute it separately with analysis.{alone[0]}"
        )
    check_dataset(ds)
    recorded = [name for name in names if _is_recorded(ds, name)]
    chosen = {name: QUANTITIES[name] for name in names if name in QUANTITIES}
    unknown = [name for name in names if name not in recorded and name not in chosen]
    known = [*QUANTITIES, *map(str, ds)]
    unknown_names = [f"{name!r}{did_you_mean(name, known)}" for name in unknown]
    if unknown or not names:
        raise InvalidArgument(
            f"got {', '.join(unknown_names) or 'no names'}, "
            f"expected recorded variables, or one or more of {', '.join(QUANTITIES)}"
        )
    require_variables(ds, *recorded)
    _check_lattice([*chosen], lattice)
    _check_known([*chosen], "min_unchanged", min_unchanged)
    measures: dict[str, tuple[str, ...]] = {}
    for quantity in chosen.values():
        of = lattice if quantity.known(lattice=lattice) else "native"
        measures[of] = (*measures.get(of, ()), *quantity.measures)
    scan = windowed_scan(ds, steps, within=within, measures=measures)
    options: dict[str, Any] = {"lattice": lattice}
    if min_unchanged is not None:
        options["min_unchanged"] = min_unchanged
    variables: dict[str, xr.DataArray] = {}
    without_steps = []
    for name in names:
        result: xr.DataArray | xr.Dataset = (
            chosen[name].function(scan, **chosen[name].known(**options))
            if name in chosen
            else scan.in_window(scan.ds[name])
        )
        part = result.to_dataset(name=name) if isinstance(result, xr.DataArray) else result
        columns = _columns(part) if recorded else dict(part.data_vars)
        variables |= {str(key): array for key, array in columns.items()}
        without_steps += [] if columns else [name]
    if without_steps:
        raise InvalidArgument(
            f"got {', '.join(without_steps)} without a value per step, or per step and population; "
            "a table with recorded variables has one line per step, so leave it out"
        )
    padded = {name: _with_every_step(array, scan) for name, array in variables.items()}
    return named_as_rows(xr.Dataset(padded), scan.ds)


def _is_recorded(ds: xr.Dataset, name: str) -> bool:
    """Return True for the name of a variable that is no quantity; the run may lack it."""
    return name not in QUANTITIES | ALONE and (name in ds.data_vars or name in RECORDED)


def _columns(result: xr.Dataset) -> dict[Hashable, xr.DataArray]:
    """Variables along step alone: one for each population, or other text label, of a variable."""
    columns: dict[Hashable, xr.DataArray] = {}
    for name, array in result.data_vars.items():
        others = [dim for dim in array.dims if dim != "step"]
        if "step" in array.dims and all(array[dim].dtype.kind in "UTO" for dim in others):
            for labels in itertools.product(*(array[dim].values.tolist() for dim in others)):
                column = array.sel(dict(zip(others, labels, strict=True)), drop=True)
                columns["_".join(map(str, (name, *labels)))] = column
    return columns


def _check_lattice(names: Sequence[str], lattice: str) -> None:
    """Raise if none of these quantities has the option lattice."""
    if lattice != "native" and not (names and all(QUANTITIES[name].only_native for name in names)):
        _check_known(names, "lattice", lattice)  # others raise their own error


def _check_known(names: Sequence[str], option: str, value: object) -> None:
    """Raise if a value is given for an option that none of these quantities has."""
    with_option = [
        name
        for name, quantity in QUANTITIES.items()
        if option in quantity.options and not (option == "lattice" and quantity.only_native)
    ]
    if value is not None and not set(names) & set(with_option):
        raise InvalidArgument(
            f"got {option}={value!r} for {', '.join(names) or 'no quantity'}; only these have it: "
            f"{', '.join(with_option)}; leave it out"
        )


def _with_every_step(array: xr.DataArray, scan: Scan) -> xr.DataArray:
    rows = scan.window.size
    if "step" not in array.dims or array.sizes["step"] == rows:
        return array
    absent = {"f": np.nan, "i": -1, "b": False}[array.dtype.kind]
    attrs: dict[str, Any] = dict(array.attrs)
    if not array.sizes["step"]:  # an empty array cannot be padded
        shape = [rows if dim == "step" else array.sizes[dim] for dim in array.dims]
        kept = {name: values for name, values in array.coords.items() if "step" not in values.dims}
        padded = xr.DataArray(np.full(shape, absent, array.dtype), dims=array.dims, coords=kept)
    else:
        missing = rows - array.sizes["step"]
        padded = array.pad(step=(missing, 0), mode="constant", constant_values=absent).astype(
            array.dtype
        )
    padded = padded.assign_coords(step=scan.in_window(scan.ds["step"])).assign_attrs(attrs)
    return with_flag(padded, -1, NO_ROW_BEFORE) if array.dtype.kind == "i" else padded


def compute_named(
    ds: xr.Dataset,
    names: Sequence[str],
    assignments: Sequence[str] = (),
    *,
    by_population: bool = False,
    lattice: str = "native",
    steps: Steps = None,
    within: bool = False,
    min_unchanged: int | None = None,
    vectors: str | None = None,
) -> xr.Dataset:
    """Compute quantities by name, with options as text, as ``trajstore analyze`` does.

    Parameters
    ----------
    ds : Dataset
        A run, or several runs from `trajstore.open_runs`, with results along ``run``.
    names : sequence of str
        Names in `QUANTITIES` and recorded variables, or one name in `ALONE`. A single quantity is
        returned as by its function, others as by `compute`. For several runs also one name in
        `ACROSS_RUNS`.
    assignments : sequence of str
        Options of a single quantity, ``name=value`` or ``name=1,2,5``.
    by_population : bool
        Statistics over the tokens of each population, for a single quantity with one number per
        token. For a category, ``tokens``, the number of tokens in each.
    lattice, steps, within, min_unchanged
        As for `compute`.
    vectors : str, optional
        Vectors in place of W, as for `vectors`: ``grad``, or with a population ``centroid:all``.

    Returns
    -------
    Dataset
        A lazy result.

    Raises
    ------
    InvalidArgument
        If a name, an option or a value is unknown, or cannot be combined with the others.

    Examples
    --------
    >>> statistics = compute_named(ds, ["displacement"], ["since=previous"], by_population=True)
    >>> statistics["max"].sel(step=1).to_series().round(4).to_dict()
    {'dead': 0.0234, 'live': 0.0156, 'all': 0.0234}
    """
    of_rows: dict[str, Any] = {"steps": steps, "within": within, "min_unchanged": min_unchanged}
    if RUN in ds.dims:
        of_rows["vectors"] = vectors
        return _compute_across_runs(ds, names, assignments, by_population, lattice, of_rows)
    ds = vectors_named(ds, vectors)
    if len(names) != 1 or _is_recorded(ds, names[0]):
        if assignments or by_population:
            raise InvalidArgument(
                f"got options or populations with {', '.join(names)}; name a single quantity, and "
                "no recorded variable"
            )
        return compute(ds, names, lattice, **of_rows)
    (name,) = names
    if name in ACROSS_RUNS:
        raise InvalidArgument(f"got one run for {name}, expected several")
    known = QUANTITIES | ALONE
    if name not in known:
        raise InvalidArgument(
            f"unknown quantity {name!r}{did_you_mean(name, [*known, *map(str, ds)])}; choose from "
            f"{', '.join(known)}"
        )
    quantity = known[name]
    options = _options(quantity, name, assignments)
    shared: dict[str, Any] = {}
    if lattice != "native":
        _check_lattice(names, lattice)
        shared |= quantity.known(lattice=lattice)
    if min_unchanged is not None:
        _check_known(names, "min_unchanged", min_unchanged)
        shared |= quantity.known(min_unchanged=min_unchanged)
    for option, value in shared.items():
        if options.setdefault(option, value) != value:
            raise InvalidArgument(
                f"got {option} twice, {value!r} and {options[option]!r}; give it once"
            )
    for option in quantity.required:
        if option not in options:
            raise InvalidArgument(
                f"{name} requires {option}; give {option}=… (a command: --set {option}=…)"
            )
    scan = windowed_scan(ds, steps, within=within)
    result = quantity.function(scan, **options)
    if by_population:
        with errors_about_rows(scan.ds):
            result = _by_population(name, result)
    elif isinstance(result, xr.DataArray):
        result = result.to_dataset(name=name)
    return named_as_rows(result, scan.ds)


def _by_population(name: str, result: xr.DataArray | xr.Dataset) -> xr.Dataset:
    if not isinstance(result, xr.DataArray) or "token" not in result.dims:
        raise InvalidArgument(f"{name} does not have one number per token; leave out by_population")
    if is_category(result):
        return category_counts(result).to_dataset(name="tokens")
    return by_population(result)


def _compute_across_runs(
    ds: xr.Dataset,
    names: Sequence[str],
    assignments: Sequence[str],
    by_population: bool,
    lattice: str,
    of_rows: Mapping[str, Any],
) -> xr.Dataset:
    across = [name for name in names if name in ACROSS_RUNS]
    others = assignments or by_population or lattice != "native" or of_rows["vectors"]
    if across and (len(names) > 1 or others):
        raise InvalidArgument(
            f"{across[0]} cannot be combined with other quantities or options; compute it alone"
        )
    if across:
        function = ACROSS_RUNS[across[0]]
        window = rows_of_window(ds, of_rows["steps"])
        result = function(window) if of_rows["within"] else function(ds).sel(step=window["step"])
    else:
        options = {"by_population": by_population, "lattice": lattice, **of_rows}
        result = over_runs(ds, compute_named, names, assignments, **options)
    return cast(xr.Dataset, result)


def _options(quantity: Quantity, name: str, assignments: Sequence[str]) -> dict[str, Any]:
    known = quantity.options
    options = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in known:
            suggestion = "" if key in known else did_you_mean(key, known)
            raise InvalidArgument(
                f"got {assignment!r}{suggestion}, expected an option of {name} as name=value; its "
                f"options: {', '.join(known) or 'none'}"
            )
        options[key] = value = _value(text)
        kinds = {"whole numbers": (int,), "numbers": (int, float)}.get(quantity.kind_of(key))
        parts = value if isinstance(value, tuple) else (value,)
        if kinds and not all(isinstance(part, kinds) for part in parts):
            raise InvalidArgument(f"got {assignment!r}, expected {quantity.kind_of(key)}")
    return options


def _value(text: str) -> Any:
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(",") if part.strip())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
