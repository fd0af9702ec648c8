"""Populations of a Dataset: dead, live and all tokens, and every other mask along token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.nearest_name import did_you_mean

POPULATIONS = ("dead", "live", "all")


def check_dataset(given: object) -> None:
    """Check that the argument is a Dataset with tokens.

    Raises
    ------
    InvalidArgument
        If it is anything else, such as the path of a run, or holds no token.
    """
    if not isinstance(given, xr.Dataset):
        raise InvalidArgument(
            f"got {type(given).__name__}, expected a Dataset of a run; open one with "
            "trajstore.open_run"
        )
    if given.sizes.get("token") == 0:
        raise InvalidArgument(
            "got a Dataset without tokens, expected at least one; select tokens that the run holds "
            "(it may have no dead or no live tokens)"
        )


def members(da: xr.DataArray | xr.Dataset) -> npt.NDArray[np.bool_]:
    """Members of the populations dead, live and all.

    Returns
    -------
    ndarray of bool, (population, token)
        In the order of `POPULATIONS`.

    Raises
    ------
    VariableNotRecorded
        If the run has no ``is_dead``.
    """
    if "is_dead" not in da.coords:
        raise VariableNotRecorded(
            "comparing dead with live tokens requires the coordinate is_dead along token, which is "
            "missing; assign it"
        )
    dead = np.asarray(da.coords["is_dead"].values, bool)
    return np.stack([dead, ~dead, np.ones_like(dead)])


def populations(
    da: xr.DataArray | xr.Dataset,
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names of the populations and their members, (population, token).

    Without ``is_dead``, the only one of the `POPULATIONS` is ``all``. Every other boolean
    coordinate along token, such as ``is_mostly_dead``, is a further population, named without
    ``is_``. Populations may overlap.
    """
    if "is_dead" in da.coords:
        names, groups = list(POPULATIONS), members(da)
    else:
        names, groups = ["all"], np.ones((1, da.sizes["token"]), bool)
    for name, mask in own_masks(da).items():
        names.append(name)
        groups = np.concatenate([groups, mask[None]])
    return names, groups


def own_masks(da: xr.DataArray | xr.Dataset) -> dict[str, npt.NDArray[np.bool_]]:
    """Populations other than `POPULATIONS`, by name.

    Raises
    ------
    InvalidArgument
        If two populations have the same name.
    """
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    for key, coordinate in da.coords.items():
        if key == "is_dead" or coordinate.dims != ("token",) or coordinate.dtype != bool:
            continue
        name = str(key).removeprefix("is_")
        if name in masks or name in POPULATIONS:
            raise InvalidArgument(
                f"the coordinate {key!r} defines a second population {name!r}; rename it"
            )
        masks[name] = np.asarray(coordinate.values)
    return masks


def chosen_populations(
    ds: xr.DataArray | xr.Dataset, population: str | Sequence[str] | None
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names and members of one, several or all populations.

    Raises
    ------
    InvalidArgument
        If a name is unknown.
    """
    names, groups = populations(ds)
    if population is None:
        return names, groups
    chosen = [population] if isinstance(population, str) else list(population)
    for name in chosen:
        if name not in names:
            known = dict.fromkeys((*POPULATIONS, *names))
            meant = "" if name in known else did_you_mean(name, known)
            raise InvalidArgument(
                f"got population={name!r}, expected {', '.join(known)}{meant}"
                + ("" if "dead" in names else "; the coordinate is_dead is missing")
            )
    return chosen, groups[[names.index(name) for name in chosen]]


def one_population(ds: xr.Dataset, population: str | None) -> npt.NDArray[np.bool_]:
    """Members of one population.

    Raises
    ------
    InvalidArgument
        If the name is unknown, or `population` does not select exactly one.
    """
    names, groups = chosen_populations(ds, population)
    if len(names) != 1:
        raise InvalidArgument(f"got population={population!r}, expected one of {', '.join(names)}")
    (group,) = groups
    return np.asarray(group)
