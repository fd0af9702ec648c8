"""What the attributes of a run say: its settings, and single parameters of the whole model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trajstore.errors import InvalidArgument, VariableNotRecorded, did_you_mean
from trajstore.provenance import RunAttributes
from trajstore.schema import KEPT, OPTIMIZER_STATE
from trajstore.values.native_types import native_type
from trajstore.values.optimizer_rule import VECTORS

if TYPE_CHECKING:
    import xarray as xr


def parameter_table(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Root attribute ``parameters``: an entry for each parameter, in the order of the model.

    Raises
    ------
    VariableNotRecorded
        If the run has no such attribute.
    """
    table: list[dict[str, Any]] | None = attributes.get("parameters")
    if table is None:
        raise VariableNotRecorded(
            "the run holds one matrix only, not all parameters; record it with "
            "variables='everything'"
        )
    return table


def parameter_entry(attributes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Entry of a parameter in the root attribute ``parameters``.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root.
    name : str
        Any of its names, if the parameter is tied.

    Raises
    ------
    VariableNotRecorded
        If the run has no such attribute.
    InvalidArgument
        If there is no parameter of that name.
    """
    known: dict[str, dict[str, Any]] = {}
    for entry in parameter_table(attributes):
        for alias in (entry["name"], *entry.get("tied", [])):
            known[alias] = entry
    if name not in known:
        raise InvalidArgument(
            f"the run has no parameter {name!r}{did_you_mean(name, known)}; list them with: "
            "trajstore info"
        )
    return known[name]


def parameter_dataset(ds: xr.Dataset, name: str) -> xr.Dataset:
    """History of one parameter, lazily.

    Parameters
    ----------
    ds : Dataset
        A run of the tier ``everything``.
    name : str
        Any of its names, if the parameter is tied.

    Returns
    -------
    Dataset
        ``W``, ``grad``, and what the optimizer keeps in its shape (``exp_avg`` …), of dims (step,
        row, column), as far as they are recorded, in dask arrays. Their attribute ``native_dtype``
        is the type of the parameter. A vector has one column; dimensions after the first are one
        column axis. ``row`` is the row number. Further: the variables along ``step`` only, with the
        ``lr`` of the parameter's group, and ``hyperparameters`` in the group of W; ``skipped`` is 1
        also in steps in which the optimizer did not count the parameter, such as those without a
        gradient. The attributes ``recording`` and ``optimizer`` are those of the parameter.

    Raises
    ------
    VariableNotRecorded
        If the run does not hold all parameters.
    InvalidArgument
        If there is no parameter of that name, or `ds` holds several runs or a part of the elements.
    """
    import xarray as xr

    entry = parameter_entry(ds.attrs, name)
    if "run" in ds.dims:
        raise InvalidArgument("got several runs, expected one; select one run: ds.isel(run=0)")
    scalars = [key for key, da in ds.data_vars.items() if da.dims == ("step",)]
    variables: dict[str, Any] = {str(key): ds[key].variable for key in scalars}
    kinds = {kind["name"]: f"params_{kind['name']}" for kind in ds.attrs.get(OPTIMIZER_STATE, ())}
    lacking = _never_kept(ds, entry["group"])
    for short, vector in (VECTORS | kinds).items():
        stored = short if entry["variable"] == "W" else vector
        if stored in ds.data_vars and short not in lacking:
            variables[short] = _matrix(ds, stored, entry, short)
    if "params_lr" in ds and entry["group"] is not None:
        variables["lr"] = ds["params_lr"].variable.isel(group=entry["group"])
    names = {}
    if "hyperparameters" in ds and entry["group"] in _groups_of_matrix(ds):
        variables["hyperparameters"] = ds["hyperparameters"].variable
        names["hyperparameter"] = ds["hyperparameter"].variable
    if "params_count" in ds:
        count = ds["params_count"].sel(parameter=entry["name"]).values
        not_taken = np.diff(count, prepend=np.nan) == 0
        if not_taken.any() and "step" not in lacking:
            skipped = np.where(np.arange(count.size) > 0, not_taken, np.nan).astype(np.float32)
            variables["skipped"] = xr.Variable("step", skipped, {"units": "1"})
    attributes, run = dict(ds.attrs), RunAttributes.of(ds.attrs)
    attributes["recording"] = {**run.recording, "parameter": entry["name"]}
    if entry["group"] is not None and run.optimizer.groups:
        of_group = run.optimizer.groups[entry["group"]]
        attributes["optimizer"] = {**run.optimizer.stored, **of_group}
    coords = {"step": ds["step"].variable, "row": np.arange((entry["shape"] or [1])[0]), **names}
    result = xr.Dataset(variables, coords=coords, attrs=attributes)
    result.encoding = dict(ds.encoding)
    return result


def _groups_of_matrix(ds: xr.Dataset) -> set[int]:
    """The parameter group of W, whose hyperparameters the run holds."""
    return {
        parameter["group"] for parameter in ds.attrs["parameters"] if parameter["variable"] == "W"
    } - {None}


def _never_kept(ds: xr.Dataset, group: int | None) -> set[str]:
    """Return what the optimizer keeps of other parameters only, not of those of a group."""
    if KEPT.name not in ds:
        return set()
    of_group = [entry["name"] for entry in ds.attrs["parameters"] if entry["group"] == group]
    names = [entry["name"] for entry in ds.attrs[OPTIMIZER_STATE]]
    lacking: set[str] = set()
    for rows in (slice(-1, None), slice(None)):  # most often, the last row alone has all marks
        marks = np.nan_to_num(ds[KEPT.name].isel(step=rows).values).astype(np.int64)
        group_marks = marks[..., ds["parameter"].isin(of_group).values]
        bits = int(np.bitwise_or.reduce(group_marks, axis=None))
        lacking = {name for place, name in enumerate(names) if not bits >> place & 1}
        if not lacking:
            break
    return lacking if marks.any() else set()


def own_type(entry: Mapping[str, Any], kind: str, joint: str) -> str:
    """Native type of a quantity of one parameter.

    A vector has another type than its parts if they have several.

    Parameters
    ----------
    entry : mapping
        Entry of the root attribute ``parameters``.
    kind : str
        ``W``, ``grad``, or the name of what the optimizer keeps.
    joint : str
        Native type of the variable that holds it.
    """
    if entry["variable"] == "W":
        return joint
    return str(entry["dtype"] if kind == "W" else entry.get(f"{kind}_dtype", joint))


def holds_all_parameters(ds: xr.Dataset) -> bool:
    """True if a Dataset holds all parameters of the model with their gradients, whole."""
    table = ds.attrs.get("parameters")
    if table is None or not {"W", "grad", "params", "params_grad"} <= set(ds.data_vars):
        return False
    (matrix,) = (each["shape"] for each in table if each["variable"] == "W")
    return [ds.sizes["token"], ds.sizes["hidden"]] == matrix and ds.sizes["element"] == _length(
        ds.attrs
    )


def _length(attributes: Mapping[str, Any]) -> int:
    """Number of elements of all parameters but W."""
    table = attributes["parameters"]
    return sum(math.prod(each["shape"]) for each in table if each["variable"] == "params")


def _matrix(ds: xr.Dataset, stored: str, entry: Mapping[str, Any], kind: str) -> xr.Variable:
    """A variable of one parameter, of dims (step, row, column)."""
    import xarray as xr

    da = ds[stored]
    if entry["variable"] == "W":
        variable = _in_dask(da.transpose("step", "token", "hidden")).variable
        _check_shape(stored, variable.shape[1:], entry["shape"])
        return xr.Variable(("step", "row", "column"), variable.data, variable.attrs)
    _check_shape(stored, (ds.sizes["element"],), [_length(ds.attrs)])
    rows, *rest = entry["shape"] or [1]
    size = math.prod(entry["shape"])
    start = entry["offset"]
    part = da.transpose("step", "element").isel(element=slice(start, start + size))
    part = _in_dask(part).chunk({"element": -1})
    values = part.variable.data.reshape(part.sizes["step"], rows, math.prod(rest))
    native = own_type(entry, kind, da.attrs.get("native_dtype", da.dtype.name))
    values = values.astype(native_type(native).stored)  # from float64 if others are float64
    return xr.Variable(("step", "row", "column"), values, {**da.attrs, "native_dtype": native})


def _in_dask(da: xr.DataArray) -> xr.DataArray:
    return da if da.chunks is not None else da.chunk(da.encoding.get("preferred_chunks", {}))


def _check_shape(name: str, shape: tuple[int, ...], whole: list[int]) -> None:
    if list(shape) != list(whole):
        raise InvalidArgument(
            f"{name}: got shape {tuple(shape)} at each step, expected {tuple(whole)}; select parts "
            "of the result instead of the run"
        )


SEED = "config.training.seed"
UNSET = "unset"
"""Text of a setting that is missing or None."""

_GROUPS = "optimizer.groups"
_MOST = 4  # settings in a label


def attribute(attributes: Mapping[str, Any], *path: str) -> Any:
    """Nested value of attributes, or None."""
    value: Any = attributes
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def settings(
    attributes: Mapping[str, Any], keys: Iterable[str] = ("config", "optimizer")
) -> dict[str, Any]:
    """Settings of a run by their full names, such as ``config.training.seed``.

    Parameters
    ----------
    attributes : mapping
        Attributes of the run's root.
    keys : iterable of str
        Names of attributes that hold settings.
    """
    return _flat({key: attributes.get(key) or {} for key in keys})


def comparable_settings(
    runs: Sequence[Mapping[str, Any]], keys: Iterable[str]
) -> list[dict[str, Any]]:
    """Settings of several runs, with the seed of a user's own loop.

    They are without the optimizer's groups, unless all runs hold these: only the tier
    ``everything`` records the groups of the other parameters.
    """
    known = [settings(run, keys) for run in runs]
    for run, values in zip(runs, known, strict=True):
        if (seed := RunAttributes.of(run).provenance.get("seed")) is not None:
            values.setdefault(SEED, seed)
    if not all(_GROUPS in each for each in known):
        for each in known:
            each.pop(_GROUPS, None)
    return known


def differing_settings(
    runs: Sequence[Mapping[str, Any]], without: Container[str] = ()
) -> dict[str, list[Any]]:
    """Settings in which runs differ, with the value in each run, or None.

    Runs are compared by the settings of the optimizer, too, if no configuration describes it.

    Parameters
    ----------
    runs : sequence of mapping
        Attributes of the roots.
    without : container of str
        Settings to leave out.

    Examples
    --------
    >>> one, other = {"training": {"seed": 1}}, {"training": {"seed": 2, "steps": 5}}
    >>> differing_settings([{"config": one}, {"config": other}])
    {'config.training.seed': [1, 2], 'config.training.steps': [None, 5]}
    """
    known = known_settings(runs)
    names = dict.fromkeys(name for each in known for name in each)
    by_name = {name: [each.get(name) for each in known] for name in names}
    return {
        name: values
        for name, values in by_name.items()
        if name not in without and any(value != values[0] for value in values)
    }


def short_names(runs: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, str]:
    """Short name of each setting; with its section, if several sections have that name."""
    every = dict.fromkeys(name for each in known_settings(runs) for name in each)
    counts = Counter(name.rpartition(".")[2] for name in every)
    return {
        name: last if counts[last := name.rpartition(".")[2]] == 1 else name.partition(".")[2]
        for name in names
    }


def run_labels(
    runs: Sequence[Mapping[str, Any]], names: Sequence[str], without: Container[str] = ()
) -> list[str]:
    """Unique label of each run, from the settings that differ.

    Parameters
    ----------
    runs : sequence of mapping
        Attributes of the roots.
    names : sequence of str
        Names of the runs. They are the labels if no setting differs, or more than four.
    without : container of str
        Settings to leave out.

    Examples
    --------
    >>> seeds = [{"config": {"training": {"seed": seed}}} for seed in (1, 2, 2)]
    >>> run_labels(seeds, ["a", "b", "c"])
    ['seed=1', 'b: seed=2', 'c: seed=2']
    """
    differing = differing_settings(runs, without)
    if len(differing) > 1:
        differing.pop(_GROUPS, None)
    if len(differing) > _MOST:  # of another optimizer: without the settings that only it has
        differing = {name: values for name, values in differing.items() if None not in values}
    if not differing or len(differing) > _MOST:
        return _unique(names)
    short = short_names(runs, differing)
    labels = [
        ", ".join(f"{short[name]}={setting_text(values[at])}" for name, values in differing.items())
        for at in range(len(runs))
    ]
    counts = Counter(labels)
    named = [
        f"{name}: {label}" if counts[label] > 1 else label
        for name, label in zip(names, labels, strict=True)
    ]
    return _unique(named)


def _unique(labels: Sequence[str]) -> list[str]:
    """Labels, with a number appended to repeated ones."""
    counts: Counter[str] = Counter()
    result = []
    for label in labels:
        counts[label] += 1
        result.append(label if counts[label] == 1 else f"{label} ({counts[label]})")
    return result


def setting_text(value: Any) -> str:
    """Text of a setting, which is never empty."""
    return UNSET if value is None else str(value)


def known_settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings to compare: those of the configuration, and what it does not describe."""
    described = all(attribute(run, "config", "optimizer") for run in runs)
    known = comparable_settings(runs, ["config"] if described else ["config", "optimizer"])
    for values in known:
        values.pop("config.training.threads", None)  # before 0.4.0 no configuration had it
    return known


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {
        name: setting
        for key, item in value.items()
        for name, setting in _flat(item, f"{prefix}{key}.").items()
    }
