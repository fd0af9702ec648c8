"""All quantities of a run by name, and several of them in one pass."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.alignments import build_alignment
from trajstore.analysis.cloud.identical_vectors import build_clusters
from trajstore.analysis.cloud.near_cells import build_adjacency
from trajstore.analysis.cloud.nearest_vectors import build_nearest_distance
from trajstore.analysis.cloud.projections import build_projection
from trajstore.analysis.cloud.shape import build_inertia, build_pca
from trajstore.analysis.model.gradient_explanation import build_explain_gradient
from trajstore.analysis.model.logit_statistics import build_logit_stats
from trajstore.analysis.motion.autocorrelation import build_autocorrelation
from trajstore.analysis.motion.collective import (
    build_bulk_thermal,
    build_centroid,
    build_coherence,
    build_distinct,
)
from trajstore.analysis.motion.freezing import build_freeze
from trajstore.analysis.motion.level_crossings import LEVELS, level_crossings
from trajstore.analysis.motion.norms import build_displacement, build_grad_norms
from trajstore.analysis.motion.paths import build_path_efficiency, build_radial_tangential
from trajstore.analysis.motion.resume_seams import build_seams
from trajstore.analysis.motion.ulp_motion import (
    build_lattice_displacement,
    build_lifecycle,
    build_regimes,
    build_ulp,
)
from trajstore.analysis.motion.velocity import build_acceleration, build_speed, build_velocity
from trajstore.analysis.optimizer.freeze_causes import build_adam_update, build_freeze_cause
from trajstore.analysis.optimizer.freeze_counterfactuals import build_freeze_blame
from trajstore.analysis.optimizer.lost_updates import build_moment_stuck
from trajstore.analysis.optimizer.moment_ratios import build_moment_error
from trajstore.analysis.optimizer.moments import build_exact_moments
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.population_statistics import by_population as statistics_by_population
from trajstore.analysis.scan.run_attributes import RUN
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several.divergence import divergence
from trajstore.analysis.several.many_runs import over_runs
from trajstore.argument_types import checks_types
from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.schema import RECORDED

__all__ = ["ACROSS_RUNS", "ALONE", "QUANTITIES", "Quantity", "answer", "compute", "crossings"]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One question about a run.

    Attributes
    ----------
    build : callable
        From a `Scan` and the options of the public function to its result.
    measures : tuple of str
        What it needs of the way between rows, with default options.
    only_native : bool
        Whether it refuses any lattice but that of W itself.
    """

    build: Callable[..., xr.DataArray | xr.Dataset]
    measures: tuple[str, ...] = ()
    only_native: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options of the public function."""
        return tuple(inspect.signature(self.build).parameters)[1:]

    def kind_of(self, option: str) -> str:
        """What values of an option are: ``text``, ``numbers`` or ``whole numbers``."""
        types = _types_in(typing.get_type_hints(self.build)[option]) - {type(None)}
        if types == {int}:
            return "whole numbers"
        return "numbers" if types <= {int, float} else "text"

    def on(self, lattice: str) -> dict[str, Any]:
        """Options that ask it on a lattice; none if it knows of none."""
        return {"lattice": lattice} if "lattice" in self.options else {}


def _types_in(hint: Any) -> set[Any]:
    """Types that a hint is made of; of a literal those of its values."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {type(part) for part in parts}
    return set().union(*map(_types_in, parts)) if parts else {hint}


def crossings(
    ds: xr.Dataset,
    quantity: str | xr.DataArray = "displacement",
    levels: Sequence[float] | float = LEVELS,
    of: str = "way",
) -> xr.Dataset:
    """First and last step at which a curve passes 50, 90 and 99 % of its way, or other levels.

    Parameters
    ----------
    ds : Dataset
        A run.
    quantity : str or DataArray
        The curve: a quantity with its default options (``displacement``), one of several variables
        of it (``freeze.frozen_fraction``), a recorded variable (``loss``), or any array along step.
    levels : float or sequence of float
    of : {'way', 'value'}
        What levels are: shares of the way from the curve's first value (where that is NaN, from the
        second) to its last, or values of the curve.

    Returns
    -------
    Dataset, int64 (level, …)
        ``first_crossing``, the first step at which the curve is at the level or beyond, after one
        at which it was not; ``last_crossing``, the last such one, after which it stays if it ends
        there. On its way it comes from below; values are passed from either side. −1 where it never
        does. With the other dimensions of the curve.

    Raises
    ------
    InvalidArgument
        For a quantity that is unknown, has several variables, or is no curve.
    VariableNotRecorded
        For a variable that was not recorded.

    Examples
    --------
    >>> crossings(ds).first_crossing.sel(token=ord("e")).values
    array([ 7, 12, 13])
    """
    return build_crossings(Scan(ds), quantity, levels, of)


@checks_types
def build_crossings(
    history: Scan,
    quantity: str | xr.DataArray = "displacement",
    levels: Sequence[float] | float = LEVELS,
    of: str = "way",
) -> xr.Dataset:
    """`crossings` of a prepared Dataset."""
    curve = _curve(history, quantity) if isinstance(quantity, str) else quantity
    return level_crossings(curve, levels, of)


def _curve(history: Scan, quantity: str) -> xr.DataArray:
    name, _, variable = quantity.partition(".")
    if name not in QUANTITIES and not variable and name in history.ds.data_vars:
        return history.ds[name]
    if name in RECORDED and not variable and name not in QUANTITIES:
        input_checks.variables(history.ds, name)  # which says how it is recorded
    if name not in QUANTITIES or name == "crossings":
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected a recorded variable or one of "
            f"{', '.join(known for known in QUANTITIES if known != 'crossings')}"
        )
    found = QUANTITIES[name].build(history)
    if isinstance(found, xr.DataArray) and not variable:
        return found
    curves = (
        [str(key) for key, array in found.data_vars.items() if "step" in array.dims]
        if isinstance(found, xr.Dataset)
        else []
    )
    if variable not in curves:
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected "
            + (" or ".join(f"{name}.{curve}" for curve in curves) or name)
        )
    curve: xr.DataArray = found[variable]
    return curve


QUANTITIES: dict[str, Quantity] = {
    "grad_norms": Quantity(build=build_grad_norms),
    "displacement": Quantity(build=build_displacement),
    "velocity": Quantity(build=build_velocity),
    "speed": Quantity(build=build_speed, measures=("step_norm",)),
    "acceleration": Quantity(build=build_acceleration),
    "lattice_displacement": Quantity(build=build_lattice_displacement),
    "ulp": Quantity(build=build_ulp),
    "regimes": Quantity(build=build_regimes, measures=("regime",)),
    "freeze": Quantity(build=build_freeze, measures=("moved",)),
    "lifecycle": Quantity(build=build_lifecycle, measures=("regime",)),
    "adam_update": Quantity(build=build_adam_update),
    "freeze_cause": Quantity(build=build_freeze_cause),
    "freeze_blame": Quantity(build=build_freeze_blame, only_native=True),
    "exact_moments": Quantity(build=build_exact_moments),
    "moment_error": Quantity(build=build_moment_error),
    "moment_stuck": Quantity(build=build_moment_stuck),
    "centroid": Quantity(build=build_centroid),
    "bulk_thermal": Quantity(build=build_bulk_thermal),
    "coherence": Quantity(build=build_coherence),
    "distinct": Quantity(build=build_distinct),
    "autocorrelation": Quantity(build=build_autocorrelation),
    "path_efficiency": Quantity(build=build_path_efficiency),
    "radial_tangential": Quantity(build=build_radial_tangential),
    "alignment": Quantity(build=build_alignment),
    "crossings": Quantity(build=build_crossings),
    "clusters": Quantity(build=build_clusters),
    "adjacency": Quantity(build=build_adjacency),
    "nearest_distance": Quantity(build=build_nearest_distance),
    "pca": Quantity(build=build_pca),
    "inertia": Quantity(build=build_inertia),
    "projection": Quantity(build=build_projection),
    "logit_stats": Quantity(build=build_logit_stats),
    "seams": Quantity(build=build_seams, measures=("step_norm",)),
}
"""What `compute` and ``trajstore analyze`` can be asked for."""

ALONE: dict[str, Quantity] = {"explain_gradient": Quantity(build=build_explain_gradient)}
"""What ``trajstore analyze`` can be asked for by itself only, about steps that are named."""


def compute(ds: xr.Dataset, names: Sequence[str], lattice: str = "native") -> xr.Dataset:
    """Several quantities together: each chunk is read once, and each block walked once.

    Still lazy: ask for the values of the whole result, or write it, to have the one pass.

    Parameters
    ----------
    ds : Dataset
        A run.
    names : sequence of str
        Of `QUANTITIES`, with their default options.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        For those of them that have this option; the others are about W as it is.

    Returns
    -------
    Dataset
        The variables that the functions of these names return: a DataArray under the name of its
        function, a Dataset's variables under their own. All have every step of `ds`; where a
        quantity has none, as the first row has no row before it, floats are NaN, whole numbers
        −1 and flags False.

    Raises
    ------
    InvalidArgument
        If a name is unknown, or there is none; for another lattice, or one where no quantity has
        that option.
    VariableNotRecorded
        If the run does not hold what one of them needs.

    Examples
    --------
    >>> result = compute(ds, ["grad_norms", "speed", "logit_stats"]).compute()
    >>> list(result)[:4]
    ['grad_norms', 'speed', 'logit_min', 'logit_max']
    """
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"got {names!r}, expected names of quantities, such as 'freeze'")
    names = list(names)
    alone = [name for name in names if name in ALONE]
    if alone:
        raise InvalidArgument(
            f"{alone[0]} is about steps that are named; ask it alone (analysis.{alone[0]})"
        )
    unknown = [name for name in names if name not in QUANTITIES]
    told = [f"{name!r}{did_you_mean(name, QUANTITIES)}" for name in unknown]
    if unknown or not names:
        raise InvalidArgument(
            f"got {', '.join(told) or 'no names'}, expected some of {', '.join(QUANTITIES)}"
        )
    asked = [QUANTITIES[name] for name in names]
    _check_lattice(names, lattice)
    measures: dict[str, tuple[str, ...]] = {}
    for quantity in asked:
        of = lattice if quantity.on(lattice) else "native"
        measures[of] = (*measures.get(of, ()), *quantity.measures)
    history = Scan(ds, measures, alone=len(names) == 1)
    variables: dict[str, xr.DataArray] = {}
    for name in names:
        result = QUANTITIES[name].build(history, **QUANTITIES[name].on(lattice))
        if isinstance(result, xr.DataArray):
            variables[name] = result
        else:
            variables |= {str(key): array for key, array in result.data_vars.items()}
    return xr.Dataset({name: _with_every_step(array, history) for name, array in variables.items()})


def _check_lattice(names: Sequence[str], lattice: str) -> None:
    """Refuse a lattice that none of these quantities knows of."""
    those = [
        name
        for name, quantity in QUANTITIES.items()
        if quantity.on(lattice) and not quantity.only_native
    ]
    if all(QUANTITIES[name].only_native for name in names):
        return  # it says itself what else there is
    if lattice != "native" and not set(names) & set(those):
        raise InvalidArgument(
            f"got lattice={lattice!r} with {', '.join(names)}, and a lattice goes with "
            f"{', '.join(those)}; leave it out"
        )


def _with_every_step(array: xr.DataArray, history: Scan) -> xr.DataArray:
    if "step" not in array.dims or array.sizes["step"] == history.rows:
        return array
    absent = {"f": np.nan, "i": -1, "b": False}[array.dtype.kind]
    attrs: dict[str, Any] = dict(array.attrs)
    if not array.sizes["step"]:  # which cannot be padded
        shape = [history.rows if dim == "step" else array.sizes[dim] for dim in array.dims]
        kept = {name: values for name, values in array.coords.items() if "step" not in values.dims}
        padded = xr.DataArray(np.full(shape, absent, array.dtype), dims=array.dims, coords=kept)
    else:
        missing = history.rows - array.sizes["step"]
        padded = array.pad(step=(missing, 0), mode="constant", constant_values=absent).astype(
            array.dtype
        )
    return padded.assign_coords(step=history.ds["step"]).assign_attrs(attrs)


ACROSS_RUNS = {"divergence": divergence}
"""What can be asked of several runs together, besides every one of `QUANTITIES` of each."""


def answer(
    ds: xr.Dataset,
    names: Sequence[str],
    assignments: Sequence[str] = (),
    *,
    by_population: bool = False,
    lattice: str = "native",
) -> xr.Dataset:
    """What ``trajstore analyze`` computes: quantities by name, with options as text.

    Parameters
    ----------
    ds : Dataset
        A run, or several as `trajstore.open_runs` opens them; then results are along ``run``.
    names : sequence of str
        Of `QUANTITIES`, or one of `ALONE`. A single one is as its function returns it, several
        as by `compute`. Of several runs also one of `ACROSS_RUNS`.
    assignments : sequence of str
        Options of a single quantity, ``name=value``; of several values ``name=1,2,5``.
    by_population : bool
        Statistics over the tokens of each population, of a single quantity that is one number
        per token.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        As for `compute`.

    Returns
    -------
    Dataset
        Lazy.

    Raises
    ------
    InvalidArgument
        If a name, an option or its value is not known, or does not go with the others.

    Examples
    --------
    >>> found = answer(ds, ["displacement"], ["since=previous"], by_population=True)
    >>> found["max"].sel(step=1).to_series().round(4).to_dict()
    {'dead': 0.0234, 'live': 0.0156, 'all': 0.0234}
    """
    if RUN in ds.dims:
        return _answer_of_runs(ds, names, assignments, by_population, lattice)
    if len(names) != 1:
        if assignments or by_population:
            raise InvalidArgument(
                "options and populations go with a single quantity; "
                f"got {len(names)}: {', '.join(names)}"
            )
        return compute(ds, names, lattice)
    (name,) = names
    if name in ACROSS_RUNS:
        raise InvalidArgument(f"{name} is about several runs, and there is one; name more")
    known = QUANTITIES | ALONE
    if name not in known:
        raise InvalidArgument(
            f"there is no quantity {name!r}{did_you_mean(name, known)}; "
            f"choose from {', '.join(known)}"
        )
    quantity = known[name]
    options = _options(quantity, name, assignments)
    if lattice != "native":
        _check_lattice(names, lattice)
        if options.get("lattice", lattice) != lattice:
            raise InvalidArgument(
                f"got two lattices, {lattice!r} and {options['lattice']!r}; name one"
            )
        options |= quantity.on(lattice)
    measures = {str(options.get("lattice", "native")): quantity.measures}
    result = quantity.build(Scan(ds, measures, alone=True), **options)
    if by_population:
        if not isinstance(result, xr.DataArray) or "token" not in result.dims:
            raise InvalidArgument(f"{name} is not one number per token, so it has no populations")
        return statistics_by_population(result)
    return result.to_dataset(name=name) if isinstance(result, xr.DataArray) else result


def _answer_of_runs(
    ds: xr.Dataset,
    names: Sequence[str],
    assignments: Sequence[str],
    by_population: bool,
    lattice: str,
) -> xr.Dataset:
    together = [name for name in names if name in ACROSS_RUNS]
    if together and (len(names) > 1 or assignments or by_population or lattice != "native"):
        raise InvalidArgument(f"{together[0]} is asked by itself, and has no options")
    if together:
        return ACROSS_RUNS[together[0]](ds)
    options = {"by_population": by_population, "lattice": lattice}
    found: xr.Dataset = over_runs(ds, answer, names, assignments, **options)
    return found


def _options(quantity: Quantity, name: str, assignments: Sequence[str]) -> dict[str, Any]:
    known = quantity.options
    options = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in known:
            meant = "" if key in known else did_you_mean(key, known)
            raise InvalidArgument(
                f"got {assignment!r}{meant}, expected name=value with a name "
                f"among {', '.join(known) or 'none, for it has no options'} of {name}"
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
