"""Variables of a result: types, attributes, flags, Datasets, and statistics over populations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.populations import (
    chosen_populations,
    members,
    own_masks,
    populations,
)

NO_ROW_BEFORE = "no_row_before"
"""Meaning of −1 in the first row of a quantity of changes between rows."""


def flag_attributes(
    meanings: Mapping[int, str] | Sequence[str], dtype: npt.DTypeLike = np.int64
) -> dict[str, Any]:
    """CF attributes with the meanings of some values of a variable.

    Parameters
    ----------
    meanings : mapping of int to str, or sequence of str
        Words without spaces, by value, or by position in a sequence. If all flagged values are
        negative, the other values of the variable are numbers; otherwise all values are flags.
    dtype : dtype
        Type of the variable.

    Examples
    --------
    >>> flag_attributes({-1: "never"})
    {'flag_values': array([-1]), 'flag_meanings': 'never'}
    """
    known = meanings if isinstance(meanings, Mapping) else dict(enumerate(meanings))
    return {
        "flag_values": np.array([*known], dtype),
        "flag_meanings": " ".join(known.values()),
    }


def flags_of(array: xr.DataArray) -> dict[int, str]:
    """Meanings of flagged values; empty if all values are numbers."""
    if "flag_values" not in array.attrs:
        return {}
    values = np.atleast_1d(array.attrs["flag_values"]).tolist()
    return dict(zip(values, array.attrs["flag_meanings"].split(), strict=True))


def is_category(array: xr.DataArray) -> bool:
    """True if every value of a variable is a flag."""
    return max(flags_of(array), default=-1) >= 0


def with_flag(array: xr.DataArray, value: int, meaning: str) -> xr.DataArray:
    """The variable with one additional flag."""
    known = {value: meaning, **flags_of(array)}
    return array.assign_attrs(flag_attributes(known, array.dtype))


class ResultVariable(NamedTuple):
    """One variable of a result.

    Attributes
    ----------
    type : str
        NumPy type of one value. A type with a shape adds dimensions.
    long_name : str
    units : str, optional
        Default: 1. None: no units.
    flags : mapping of int to str, or sequence of str
        As for `flag_attributes`.
    """

    type: str
    long_name: str
    units: str | None = "1"
    flags: Mapping[int, str] | Sequence[str] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        """CF attributes of the variable."""
        units = {} if self.units is None else {"units": self.units}
        flags = flag_attributes(self.flags, np.dtype(self.type).base) if self.flags else {}
        return {"long_name": self.long_name, **units, **flags}


ResultVariables = Mapping[str, ResultVariable]
"""Variables of a result by name."""


def record_of(variables: ResultVariables) -> np.dtype[Any]:
    """Structured type with one field per variable."""
    return np.dtype([(name, variable.type) for name, variable in variables.items()])


def dataset(
    variables: Mapping[str, tuple[Any, Any, ResultVariable]], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of variables: dimensions, data, and the attributes."""
    arrays = {
        name: (dims, data, variable.attributes)
        for name, (dims, data, variable) in variables.items()
    }
    return xr.Dataset(arrays, coords)


def field(measured: da.Array, name: str) -> da.Array:
    """One field of structured blocks, contiguous. A field with a shape adds dimensions.

    Parameters
    ----------
    measured : dask Array of a structured dtype
    name : str
    """
    kind = measured.dtype[name]
    ndim = measured.ndim + len(kind.shape)
    return measured.map_blocks(
        _field,
        name,
        dtype=kind.base,
        new_axis=list(range(measured.ndim, ndim)) or None,
        chunks=(*measured.chunks, *((length,) for length in kind.shape)),
        meta=np.empty((0,) * ndim, kind.base),
        token=f"field-{name}",
    )


def _field(measured: npt.NDArray[np.void], name: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(measured[name])


def table(
    measured: da.Array, results: ResultVariables, dims: Sequence[str], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of measured variables, with their attributes.

    Parameters
    ----------
    measured : dask Array of `record_of` these variables
    results : mapping of str to ResultVariable
    dims : sequence of str
        Dimensions of the array, and the one that a type with a shape adds.
    coords : mapping
    """
    arrays = {name: field(measured, name) for name in results}
    variables = {name: (dims[: data.ndim], data, results[name]) for name, data in arrays.items()}
    return dataset(variables, coords)


_STATISTICS = ("mean", "std", "min", "max", "median")


def with_mostly_dead(ds: xr.Dataset) -> xr.Dataset:
    """Add the coordinate ``is_mostly_dead`` if the configuration defines it.

    Parameters
    ----------
    ds : Dataset
        A run. If it was recorded with ``data.mostly_dead`` = n, tokens that occur at least once and
        at most n times in the corpus (``token_count``) are mostly dead.
    """
    config = ds.attrs.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    most = data.get("mostly_dead") if isinstance(data, Mapping) else None
    if most is None or "token_count" not in ds.coords or "is_mostly_dead" in ds.coords:
        return ds
    count = ds["token_count"]
    rare = ((count > 0) & (count <= most)).drop_attrs()
    return ds.assign_coords(is_mostly_dead=rare.variable)


def over_groups(
    kernel: Callable[..., npt.NDArray[Any]],
    da: xr.DataArray,
    names: Sequence[str],
    groups: npt.NDArray[np.bool_],
    dim: str,
    size: int,
    dtype: npt.DTypeLike,
    **options: Any,
) -> xr.DataArray:
    """Statistics of the tokens of each group, (…, population, `dim`), lazy if `da` is.

    Parameters
    ----------
    kernel : callable
        Function of values (…, token), groups (population, token) and options.
    da : DataArray (…, token)
    names : sequence of str
    groups : ndarray of bool (population, token)
    dim : str
    size : int
        Length of `dim`.
    dtype : dtype
    """
    statistics: xr.DataArray = xr.apply_ufunc(
        kernel,
        da.chunk({"token": -1}) if da.chunks is not None else da,
        groups,  # an argument: a keyword would be copied into each task
        kwargs=options,
        input_core_dims=[["token"], ["population", "token"]],
        output_core_dims=[["population", dim]],
        dask="parallelized",
        output_dtypes=[dtype],
        dask_gufunc_kwargs={"output_sizes": {"population": len(names), dim: size}},
        keep_attrs=False,
    )
    return statistics.assign_coords(population=names)


def _count(
    values: npt.NDArray[np.int8], groups: npt.NDArray[np.bool_], kinds: int
) -> npt.NDArray[np.int64]:
    """Count of each value in each group: (…, token) to (…, population, kind)."""
    flags = values[..., None, :] == np.arange(kinds)[:, None]
    return np.stack([flags[..., group].sum(-1) for group in groups], -2)


def count_by_population(da: xr.DataArray, kinds: int, dim: str) -> xr.DataArray:
    """Number of tokens in each population with each value 0, 1, … of `da`.

    Parameters
    ----------
    da : DataArray of int8, (…, token)
    kinds : int
        Number of values.
    dim : str
        Name of the dimension of the values.

    Returns
    -------
    DataArray, int64 (…, population, `dim`)
    """
    return over_groups(_count, da, *populations(da), dim, kinds, np.int64, kinds=kinds)


def _statistics(
    values: npt.NDArray[Any], groups: npt.NDArray[np.bool_], quantiles: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Statistics over the last axis: (…, population, statistic and quantile), float64."""
    result = np.full((*values.shape[:-1], len(groups), len(_STATISTICS) + quantiles.size), np.nan)
    for number, group in enumerate(groups):
        if not group.any():
            continue
        out = result[..., number, :]
        with np.errstate(invalid="ignore"):  # inf − inf is NaN, a valid result
            # Widened after sorting: narrow numbers sort in half the time.
            chosen = np.sort(values[..., group], axis=-1).astype(np.float64)
            out[..., 0] = chosen.mean(-1)
            out[..., 1] = chosen.std(-1)
            # NaN sorts last. It must make every statistic NaN, not only the maximum.
            out[..., 2:] = np.moveaxis(
                np.quantile(chosen, np.concatenate([[0, 1, 0.5], quantiles]), axis=-1), 0, -1
            )
        out[np.isnan(chosen[..., -1])] = np.nan
    return result


def category_counts(da: xr.DataArray) -> xr.DataArray:
    """Number of tokens in each population and each category of a variable.

    Parameters
    ----------
    da : DataArray, (…, token)
        A variable whose values are all flags, 0, 1, ….

    Returns
    -------
    DataArray, int64 (…, population, category)
    """
    names = [meaning for value, meaning in sorted(flags_of(da).items()) if value >= 0]
    counts = count_by_population(da, len(names), "category").assign_coords(category=names)
    long_name = da.attrs.get("long_name", da.name)
    return counts.assign_attrs(long_name=f"number of tokens by {long_name}", units="1")


@checks_types
def by_population(
    da: xr.DataArray, quantiles: Sequence[float] | float = (0.05, 0.25, 0.75, 0.95)
) -> xr.Dataset:
    """Statistics over the tokens of each population: dead, live, all, and user-defined.

    Parameters
    ----------
    da : DataArray, (…, token)
        Values per token, with the coordinate ``is_dead`` and those of other populations.
    quantiles : float or sequence of float
        From 0 to 1, with linear interpolation.

    Returns
    -------
    Dataset
        ``mean``, ``std`` (population standard deviation), ``min``, ``max``, ``median`` over
        (…, population) and ``quantiles`` over (…, population, quantile), float64. All are NaN if a
        token is NaN, or a population has no tokens.

    Raises
    ------
    VariableNotRecorded
        If ``is_dead`` is missing, and there is no other population.
    InvalidArgument
        If the dimension token is missing, or a quantile is not from 0 to 1.

    Examples
    --------
    >>> from trajstore.analysis import grad_norms
    >>> norms = by_population(grad_norms(ds))
    >>> norms["mean"].sel(step=1).to_series().round(3).to_dict()
    {'dead': 0.009, 'live': 0.103, 'all': 0.016}
    """
    if "token" not in da.dims:
        raise InvalidArgument(f"got dimensions {da.dims}, expected token among them")
    levels = input_checks.quantile_levels(quantiles)
    if not own_masks(da):
        members(da)  # raises if missing
    return statistics(da, levels)


def statistics(
    da: xr.DataArray,
    levels: npt.NDArray[np.float64],
    population: Sequence[str] | None = None,
) -> xr.Dataset:
    """`by_population` for selected populations, also without ``is_dead``.

    Raises
    ------
    InvalidArgument
        If a population is unknown.
    """
    names, groups = chosen_populations(da, population)
    width = len(_STATISTICS) + levels.size
    table = over_groups(
        _statistics, da, names, groups, "statistic", width, np.float64, quantiles=levels
    )
    units = {"units": da.attrs["units"]} if "units" in da.attrs else {}
    name = da.attrs.get("long_name", da.name or "value")

    def pick(part: int | slice, label: str) -> xr.DataArray:
        picked: xr.DataArray = table.isel(statistic=part).assign_attrs(
            long_name=f"{label} of {name}", **units
        )
        return picked

    ds = xr.Dataset({label: pick(at, label) for at, label in enumerate(_STATISTICS)})
    quantiles = pick(slice(len(_STATISTICS), None), "quantiles").rename(statistic="quantile")
    quantile_table: xr.Dataset = ds.assign(quantiles=quantiles.assign_coords(quantile=levels))
    return quantile_table
