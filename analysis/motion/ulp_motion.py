"""Motion on the lattice of a type: spacings, hops, regimes, and a heatmap of the hops."""

from __future__ import annotations

import functools
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.vectors import check_order, order_label
from trajstore.analysis.scan.block_tasks import Array, along, measure
from trajstore.analysis.scan.quantity import quantity, registered, takes_scan
from trajstore.analysis.scan.result_variables import (
    NO_ROW_BEFORE,
    ResultVariable,
    count_by_population,
    dataset,
    flag_attributes,
    table,
)
from trajstore.analysis.scan.rows import (
    REGIMES,
    chosen_type,
    lattice_attributes,
    on_lattice,
    regime_of_hops,
    with_lattice_attributes,
)
from trajstore.analysis.scan.scan import Scan, native_dtype
from trajstore.arguments import Count, checks_types
from trajstore.errors import InvalidArgument
from trajstore.values.native_types import NATIVE_TYPES, binade, ordinal, ordinal_dtype, spacing
from trajstore.values.norms import ulp_hops

_CROSSINGS = {
    f"exponent_{way}": ResultVariable("i8", f"elements whose exponent went {way}")
    for way in ("up", "down")
}

_PHASES = {
    "last_far": ("far",),
    "last_jump": ("jump",),
    "last_local": ("local",),
    "last_hop": ("neighbor", "single"),
}


@registered()
@checks_types
def ulp(
    W: xr.DataArray | xr.Dataset | Scan,
    lattice: str = "native",
    direction: Literal["outward", "up"] = "outward",
) -> xr.DataArray:
    """Spacing of the native type, or of another lattice, at each magnitude.

    For bfloat16 this is 2^(max(E, 1) − 134), E the biased exponent, so 2^−133 for subnormals and
    zero. The spacing of the float32 that stores the value would be 65,536 times too small.

    Parameters
    ----------
    W : DataArray of any shape, or a Dataset with ``W``
        The attribute ``native_dtype`` names the type. Default: the type of the array.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type and return its spacing.
    direction : {'outward', 'up'}
        ``'outward'``: to the next value of larger magnitude. ``'up'``: to the next larger number,
        as by ``nextafter(W, inf)``; at negative powers of two that is half the spacing.

    Returns
    -------
    DataArray, same type (float32 on another lattice) and shape
        NaN where W is infinite or NaN.

    Raises
    ------
    InvalidArgument
        For an unknown lattice or direction, or if W holds values that its ``native_dtype`` does
        not.

    Examples
    --------
    >>> ds.W.sel(step=0, token=[ord("e"), ord("z")]).isel(hidden=0).values
    array([1.5 , 0.75], dtype=float32)
    >>> ulp(ds).sel(step=0, token=[ord("e"), ord("z")]).isel(hidden=0).values
    array([0.0078125 , 0.00390625], dtype=float32)
    """
    if isinstance(W, xr.Dataset):
        W = Scan(W)
    if isinstance(W, Scan):
        cells = W.lattice_type(lattice) and "W" not in W.ds
        W = W.in_window(W.variable("cells" if cells else "W"))
    native = native_dtype(W)
    chosen = chosen_type(lattice, native)
    name = str(W.name or "W")  # a reference to W would copy it into each task
    result: xr.DataArray = xr.apply_ufunc(
        lambda values: _spacing_on_lattice(values, name, native, chosen, direction),
        W,
        dask="parallelized",
        output_dtypes=[W.dtype if chosen == native else NATIVE_TYPES[chosen].stored],
        keep_attrs=False,
    )
    return result.rename("ulp").assign_attrs(
        long_name=f"spacing of {chosen}", units=W.attrs.get("units", "1")
    )


def _spacing_on_lattice(
    values: npt.NDArray[Any], name: str, native: str, chosen: str, direction: str
) -> npt.NDArray[Any]:
    whole = np.ascontiguousarray(values).reshape(values.shape)
    points = on_lattice(whole, name, native, chosen)
    spacings = spacing(points, chosen)
    if direction == "up":
        power = binade(points, chosen)
        least = NATIVE_TYPES[chosen].least_normal  # the spacing below it is the same
        spacings[(points == -power) & (power > least)] /= 2
    return spacings


def _hops(
    later: npt.NDArray[Any], earlier: npt.NDArray[Any], native: str, metric: str
) -> npt.NDArray[Any]:
    if metric == "ulp":
        return ulp_hops(earlier, later, native)
    return np.asarray(ordinal(later, native).astype(np.int64) - ordinal(earlier, native))


@quantity()
def lattice_displacement(
    scan: Scan,
    metric: Literal["ulp", "ordinal"] = "ulp",
    ord: float | None = None,
    lattice: str = "native",
) -> xr.DataArray:
    """Displacement of each element between rows, counted on the lattice of a type.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    metric : {'ulp', 'ordinal'}
        ``'ulp'``: ΔW/ulp(W_{t−1}). ``'ordinal'``: the exact number of representable values
        between the two, from the order of the bit patterns; −0.0 and +0.0 are the same point. Both
        agree within a binade. Down across a power of two, the neighbor is half a spacing away.
    ord : {1, 2, inf}, optional
        Norm over hidden. Default: the signed value of every element.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type and count its values.

    Returns
    -------
    DataArray, (step, token, hidden) or (step, token)
        One row fewer than `ds`. Elements: float64 (ulp) or int64 (ordinal). Norms: float32, but
        int64 for ordinal norms of order 1 and inf. For ulp and order 1 on the native lattice, a
        stored ``W_ulp_l1`` is used. Unchanged elements are 0, also NaN and infinities. A NaN that
        changes is NaN in ulp.

    Raises
    ------
    InvalidArgument
        For an unknown metric, order or lattice, for ordinals of a float64 run, or if W holds values
        that its ``native_dtype`` does not.

    Examples
    --------
    >>> lattice_displacement(ds).sel(step=1, token=ord("e")).values
    array([ 1.,  1., -1.,  1.])
    >>> float(lattice_displacement(ds, ord=1).sel(step=1, token=ord("e")))
    4.0
    """
    may_be_stored = metric == "ulp" and ord is not None and lattice == "native"
    without_W = may_be_stored and "W" not in scan.ds
    chosen = "" if without_W else scan.lattice_type(lattice)
    if metric == "ordinal" and chosen:
        ordinal_dtype(chosen)
    unit = f"{chosen or lattice} {'spacings' if metric == 'ulp' else 'values'}"
    if ord is None:
        kernel = functools.partial(_hops, native=chosen, metric=metric)
        dtype = np.float64 if metric == "ulp" else np.int64
        hops = scan.between_rows(scan.points(lattice), kernel, dtype)
        label = "hop"
    else:
        order = check_order(ord)
        name = f"{metric}_{'inf' if np.isinf(order) else int(order)}"
        hops = scan.ulp_l1(lattice) if name == "ulp_1" else scan.pair(name, lattice)
        label = f"{order_label(order)} norm of the hops"
    return hops.rename("lattice_displacement").assign_attrs(
        long_name=f"{label} on the lattice", units=unit, **lattice_attributes(lattice)
    )


def _regime(scan: Scan, lattice: str) -> xr.DataArray:
    return (
        scan.pair("regime", lattice)
        .rename("regime")
        .assign_attrs(
            long_name="regime of the motion from the previous row",
            **flag_attributes(REGIMES, np.int8),
            **lattice_attributes(lattice),
        )
    )


@quantity(measures=("regime",))
def regimes(
    scan: Scan,
    lattice: str = "native",
    neighbor: float = 1,
    jump: float | None = None,
    far: float | None = None,
) -> xr.Dataset:
    """Regime of each token at each step, by norms of its hops ΔW/ulp(W_{t−1}) over hidden.

    - ``unchanged``: L1 = 0: no bit changed
    - ``single``: 0 < L1 ≤ 1: one element moved by one spacing, or by half a spacing down across a
      power of two
    - ``neighbor``: L∞ ≤ 1, L1 > 1: no element moved further than to its neighbor
    - ``local``: L∞ > 1, L2 ≤ √D
    - ``jump``: L2 > √D, or a NaN or infinity appeared or disappeared
    - ``far``: only with the option `far`: L2 > far

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type and use its spacing.
    neighbor : float
        Largest L∞ of a neighbor, in cells.
    jump : float, optional
        Largest L2 of a local motion, in cells. Default: √D.
    far : float, optional
        Largest L2 of a jump, in cells, such as 1000; at least `jump`. Default: no class ``far``.

    Returns
    -------
    Dataset
        ``regime``, int8 (step, token), with CF ``flag_values`` and ``flag_meanings``; ``counts``,
        int64 (step, population, regime_name): the number of tokens; ``heated`` and ``cooled``,
        int64 (step, population): the number of tokens with a higher or lower regime than at the
        previous row, in the order of the table; −1 at the first. One row fewer than `ds`.

    Raises
    ------
    InvalidArgument
        For an unknown lattice, thresholds that do not increase, or if W holds values that its
        ``native_dtype`` does not.

    Examples
    --------
    >>> counts = regimes(ds).counts.sel(population="dead")
    >>> counts.sel(step=1, regime_name=["unchanged", "neighbor", "jump"]).values
    array([  0,   0, 118])
    >>> counts.sel(step=18, regime_name=["unchanged", "neighbor", "jump"]).values
    array([118,   0,   0])
    """
    regime, names = _regime(scan, lattice), list(REGIMES)
    if (neighbor, jump, far) != (1, None, None):
        regime, names = _by_thresholds(regime, scan, lattice, neighbor, jump, far)
    counts = count_by_population(regime, len(names), "regime_name").assign_coords(regime_name=names)
    variables = {"counts": counts.assign_attrs(long_name="tokens in each regime", units="1")}
    changes = _changes(regime)
    for number, name in ((2, "heated"), (0, "cooled")):
        changed = changes.isel(change=number)
        variables[name] = changed.assign_attrs(
            long_name=f"tokens that {name} since the previous row",
            units="1",
            **flag_attributes({-1: NO_ROW_BEFORE}),
        )
    return xr.Dataset({"regime": regime, **variables})


def _changes(regime: xr.DataArray) -> xr.DataArray:
    """Tokens that cooled (0), kept their regime (1) or heated (2), (step, population, change)."""
    later = regime.isel(step=slice(1, None))
    earlier = regime.isel(step=slice(-1)).assign_coords(step=later["step"])
    counts = count_by_population((later - earlier).clip(-1, 1) + 1, 3, "change")
    first = da.full((min(1, regime.sizes["step"]), *counts.shape[1:]), -1, np.int64)
    return xr.DataArray(
        da.concatenate([first, counts.data]),
        dims=counts.dims,
        coords={"step": regime["step"], "population": counts["population"]},
    )


def _by_thresholds(
    usual: xr.DataArray,
    scan: Scan,
    lattice: str,
    neighbor: float,
    jump: float | None,
    far: float | None,
) -> tuple[xr.DataArray, list[str]]:
    """Regimes with other thresholds, and their names."""
    points = scan.points(lattice)
    least = np.sqrt(points.blocks.shape[2]) if jump is None else jump
    if not 0 < neighbor <= least <= (np.inf if far is None else far):
        raise InvalidArgument(
            f"got neighbor={neighbor}, jump={least:g} and far={far}, expected positive numbers of "
            "cells that increase (default of jump: √hidden)"
        )
    indices = measure(
        _other_regimes,
        points,
        dims=("step", "token"),
        native=points.type,
        neighbor=neighbor,
        jump=least,
        far=np.inf if far is None else far,
        dtype=np.int8,
        by_row=True,
    )
    names = [*REGIMES] if far is None else [*REGIMES, "far"]
    return usual.copy(data=indices[1:]).assign_attrs(flag_attributes(names, np.int8)), names


def _other_regimes(
    now: npt.NDArray[Any], before: npt.NDArray[Any], native: str, **thresholds: float
) -> npt.NDArray[np.int8]:
    return regime_of_hops(ulp_hops(before, now, native), **thresholds)


def _exponents(
    now: npt.NDArray[Any], before: npt.NDArray[Any], native: str
) -> dict[str, npt.NDArray[np.int64]]:
    earlier, later = binade(before, native), binade(now, native)
    known = np.isfinite(earlier) & np.isfinite(later)
    return {
        "exponent_up": (known & (later > earlier)).sum(-1),
        "exponent_down": (known & (later < earlier)).sum(-1),
    }


@quantity()
def exponent_crossings(scan: Scan, lattice: str = "native") -> xr.Dataset:
    """Number of elements of each token whose exponent changed since the previous row.

    The exponent is that of the binade of ``|W|``, so the spacing of the lattice changes with it.
    Subnormals and zero have the exponent of the smallest normal number.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type.

    Returns
    -------
    Dataset, int64 (step, token), one row fewer than `ds`
        ``exponent_up`` and ``exponent_down``: the number of elements with a larger or smaller
        exponent than in the previous row. Infinities and NaN are not counted.

    Raises
    ------
    InvalidArgument
        For an unknown lattice, or if W holds values that its ``native_dtype`` does not.

    Examples
    --------
    >>> found = exponent_crossings(ds)
    >>> found.exponent_down.sum("step").sel(token=[ord("e"), ord("z")]).values
    array([0, 0])
    """
    scan.require_rows(1, "exponent_crossings")
    points = scan.points(lattice)
    counts = measure(
        _exponents,
        points,
        dims=("step", "token"),
        native=points.type,
        dtype=_CROSSINGS,
        by_row=True,
    )
    result = scan.of_tokens(counts[1:], _CROSSINGS, points.variable, rows=slice(1, None))
    return with_lattice_attributes(result, lattice)


def _last_steps(
    regime: npt.NDArray[np.int8], steps: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Last step of each phase in a block of rows, (1, phase, token); −1 means none."""
    return np.stack(
        [np.where(each[regime], steps[..., 0], -1).max(0, initial=-1) for each in inside]
    )[None]


@quantity(measures=("regime",))
def lifecycle(scan: Scan, lattice: str = "native", far: float | None = None) -> xr.Dataset:
    """Last step of each token in each regime of motion.

    A token may leave and reenter a regime several times before it freezes. The last time counts.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        As for `regimes`.
    far : float, optional
        Largest L2 of a jump, in cells, such as 1000; at least √hidden. Default: no ``far``.

    Returns
    -------
    Dataset
        int64 (token): ``last_jump``, ``last_local`` and ``last_hop`` (neighbor or single), the
        last step in the regime, −1 if there is none. With `far` also ``last_far``.

    Raises
    ------
    InvalidArgument
        As for `regimes`.

    Examples
    --------
    >>> lifecycle(ds).last_hop.groupby("is_dead").max().values  # live and dead tokens
    array([13, 16])
    """
    regime, names = _regime(scan, lattice), list(REGIMES)
    if far is not None:
        regime, names = _by_thresholds(regime, scan, lattice, 1, None, far)
    phases = {name: phase for name, phase in _PHASES.items() if {*phase} <= {*names}}
    sizes = {"step": 1, "phase": len(phases)}
    blocks = measure(
        _last_steps,
        regime.data,
        scan.steps[1:],
        inside=np.array([[name in phase for name in names] for phase in phases.values()]),
        dims=("step", "phase", "token"),
        dtype=np.int64,
        sizes=sizes,
    )
    last = blocks.max(0)
    coords = {name: values for name, values in regime.coords.items() if values.dims == ("token",)}
    variables = {}
    for number, (name, phase) in enumerate(phases.items()):
        text = f"last step in the regime {' or '.join(phase)}"
        variables[name] = "token", last[number], ResultVariable("i8", text, flags={-1: "never"})
    return with_lattice_attributes(dataset(variables, coords), lattice)


_FACTS = {
    "dead_fraction": ResultVariable("f8", "fraction of dead tokens"),
    "last_motion": ResultVariable(
        "i8", "last motion of any of its tokens", None, flags={-1: "never"}
    ),
}


def _starts(length: int, most: int) -> npt.NDArray[np.intp]:
    """First indices of at most `most` groups, whose sizes differ by at most one."""
    groups = max(1, min(length, most))
    return np.asarray(np.arange(groups) * length // groups, np.intp)


def _most_common(values: Array, rows: Array, columns: Array) -> npt.NDArray[np.int8]:
    """Most common regime of each group; of equally common ones, that of longer hops."""
    kinds = len(REGIMES)
    sizes = np.diff(columns, append=values.shape[1])
    firsts = np.repeat(np.arange(columns.size) * kinds, sizes)
    result = np.empty((rows.size, columns.size), np.int8)
    for number, group in enumerate(np.split(values, rows[1:])):
        counts = np.bincount((firsts + group).ravel(), minlength=kinds * columns.size)
        longest_first = counts.reshape(-1, kinds)[:, ::-1]
        result[number] = kinds - 1 - longest_first.argmax(1)
    return result


def _mean(values: Array, rows: Array, columns: Array) -> npt.NDArray[np.float64]:
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0, dtype=np.float64), columns, axis=1)
    sizes = np.outer(
        np.diff(rows, append=values.shape[0]), np.diff(columns, append=values.shape[1])
    )
    return np.asarray(sums / sizes)


def _groups(values: Array, last: Array, rows: Array, columns: Array, regime: bool) -> Array:
    sorted_ = values[:, np.argsort(last, kind="stable")]
    return (_most_common if regime else _mean)(sorted_, rows, columns)


def _of_tokens(last: Array, columns: Array, members: Array) -> dict[str, Array]:
    """Last motion of each group, and the fraction of its tokens that are members."""
    order = np.argsort(last, kind="stable")
    ends = np.append(columns[1:], last.size) - 1
    fraction = _mean(members[None, order], np.zeros(1, np.intp), columns)[0]
    return {"last_motion": last[order][ends], "dead_fraction": fraction}


@takes_scan
def heatmap(
    scan: Scan,
    of: Literal["regime", "hop"] = "regime",
    lattice: str = "native",
    most_steps: Count = 1000,
    most_groups: Count = 600,
) -> xr.Dataset:
    """Update size of the tokens at each step, with tokens sorted by their last motion.

    Long runs are pooled: consecutive steps, and tokens that are consecutive in this order, form
    groups whose sizes differ by at most one. No step or token is left out.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    of : {'regime', 'hop'}
        The most common regime of each group (of equally common ones, that of longer hops), or the
        mean hop (L1 norm, in lattice spacings).
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        As for `regimes`.
    most_steps, most_groups : int
        Maximum number of groups of steps and of tokens.

    Returns
    -------
    Dataset
        ``update_size`` (step, group), int8 with CF flags or float64. Groups run from the tokens
        that froze first to those that moved longest. ``step`` is the first step of a group of
        steps, and ``steps`` their number. Along ``group``: ``tokens``, the number of tokens, and
        ``last_motion``, int64, the last step at which any of them moved, −1 if none ever did. If
        the run has ``is_dead``: ``dead_fraction``, float64, the fraction of dead tokens.

    Raises
    ------
    InvalidArgument
        For an unknown `of` or lattice, fewer than one group, or a run of fewer than two rows.

    Examples
    --------
    >>> found = heatmap(ds, most_groups=4)
    >>> found.last_motion.values, found.tokens.values
    (array([16, 16, 16, 16]), array([32, 32, 32, 32]))
    """
    scan.require_rows(2, "heatmap")
    regime = of == "regime"
    values = (
        regimes(scan, lattice)["regime"]
        if regime
        else lattice_displacement(scan, ord=1, lattice=lattice)
    )
    last = freeze(scan, lattice=lattice)["last_motion"]
    rows = _starts(values.sizes["step"], most_steps)
    columns = _starts(values.sizes["token"], most_groups)
    sizes = {"row": rows.size, "group": columns.size}
    data = measure(
        _groups,
        _whole(values.transpose("step", "token")),
        along(_whole(last), "token"),
        dims=("row", "group"),
        rows=rows,
        columns=columns,
        regime=regime,
        dtype=np.int8 if regime else np.float64,
        sizes=sizes,
    )
    dead = values.coords.get("is_dead", xr.zeros_like(last, bool)).values
    of_tokens = measure(
        _of_tokens,
        along(_whole(last), "token"),
        dims=("group",),
        columns=columns,
        members=dead,
        dtype=_FACTS,
        sizes={"group": columns.size},
    )
    coords = {
        "step": values["step"].values[rows],
        "steps": ("step", np.diff(rows, append=values.sizes["step"])),
        "tokens": ("group", np.diff(columns, append=values.sizes["token"])),
    }
    result = table(of_tokens, _FACTS, ("group",), coords)
    result["update_size"] = ("step", "group"), data, values.attrs
    names = ["dead_fraction"] * ("is_dead" in values.coords) + ["update_size", "last_motion"]
    return result[names]


def _whole(values: xr.DataArray) -> da.Array:
    """The values as a dask array of a single chunk."""
    return da.asarray(values.data).rechunk(-1)
