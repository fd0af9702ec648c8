"""The populations of a Dataset: dead, live and all tokens, and every other mask along token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.nearest_name import did_you_mean

__all__ = [
    "POPULATIONS",
    "check_dataset",
    "chosen_populations",
    "members",
    "one_population",
    "own_masks",
    "populations",
]


POPULATIONS = ("dead", "live", "all")


def check_dataset(given: object) -> None:
    """Check that a question is asked of a Dataset with tokens.

    Raises
    ------
    InvalidArgument
        If it is anything else, such as the path of a run, or no token is left in it.
    """
    if not isinstance(given, xr.Dataset):
        raise InvalidArgument(
            f"got {type(given).__name__} where a Dataset of a run is expected, as "
            "trajstore.open_run opens it"
        )
    if given.sizes.get("token") == 0:
        raise InvalidArgument(
            "there is no token in this Dataset, so nothing can be asked of it; choose tokens that "
            "the run holds (it may have no dead ones, or no live ones)"
        )


def members(da: xr.DataArray | xr.Dataset) -> npt.NDArray[np.bool_]:
    """Which tokens belong to which population.

    Returns
    -------
    ndarray of bool, (population, token)
        In the order of `POPULATIONS`.

    Raises
    ------
    VariableNotRecorded
        If the run does not say which tokens are dead.
    """
    if "is_dead" not in da.coords:
        raise VariableNotRecorded(
            "this question compares dead with live tokens, and there is no coordinate is_dead; "
            "assign one along token"
        )
    dead = np.asarray(da.coords["is_dead"].values, bool)
    return np.stack([dead, ~dead, np.ones_like(dead)])


def populations(
    da: xr.DataArray | xr.Dataset,
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names of the populations and their members, (population, token).

    Where nothing says which tokens are dead, the only one of the `POPULATIONS` is ``all``. Every
    other coordinate of truth values along token makes one more, under its name without ``is_``,
    such as ``is_mostly_dead``. They may overlap.
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
    """Populations besides `POPULATIONS`, by name.

    Raises
    ------
    InvalidArgument
        If two have one name.
    """
    masks: dict[str, npt.NDArray[np.bool_]] = {}
    for key, coordinate in da.coords.items():
        if key == "is_dead" or coordinate.dims != ("token",) or coordinate.dtype != bool:
            continue
        name = str(key).removeprefix("is_")
        if name in masks or name in POPULATIONS:
            raise InvalidArgument(
                f"the coordinate {key!r} makes a second population {name!r}; rename it"
            )
        masks[name] = np.asarray(coordinate.values)
    return masks


def chosen_populations(
    ds: xr.DataArray | xr.Dataset, population: str | Sequence[str] | None
) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Names and members of one population, of several, or of all of them.

    Raises
    ------
    InvalidArgument
        If there is none of that name.
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
                + ("" if "dead" in names else "; there is no coordinate is_dead here")
            )
    return chosen, groups[[names.index(name) for name in chosen]]


def one_population(ds: xr.Dataset, population: str | None) -> npt.NDArray[np.bool_]:
    """Members of one population, which is named.

    Raises
    ------
    InvalidArgument
        If there is none of that name, or another number of them is asked for.
    """
    names, groups = chosen_populations(ds, population)
    if len(names) != 1:
        raise InvalidArgument(f"got population={population!r}, expected one of {', '.join(names)}")
    (group,) = groups
    return np.asarray(group)
