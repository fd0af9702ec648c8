"""Groups of tokens with bit-identical vectors, and how the groups change.

Vectors of a row are grouped by a hash of their bits. The hash is checked: each vector is compared
with the first vector of its group. If two different vectors share a hash, the row is grouped by all
bits instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array, ConsecutiveRows, Numbers, in_halves, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import (
    NO_ROW_BEFORE,
    ResultVariable,
    flag_attributes,
    record_of,
    table,
)
from trajstore.analysis.scan.rows import with_lattice_attributes
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Count
from trajstore.populations import chosen_populations
from trajstore.values.native_types import unsigned_view

EVENTS = ("birth", "merge", "fission", "death")
"""Changes of a group from one row to the next."""

# Seed of the random factors of the hash.
_SEED = 20_17


def _hashes(bits: Array) -> npt.NDArray[np.uint64]:
    """Hash of each vector of unsigned integers, (token, hidden) to (token).

    The hash is the sum of products with random 64-bit numbers, modulo 2⁶⁴. Values are split into
    32-bit halves, so that each bit affects many bits of the product.
    """
    # 16 bits are widened: an odd number of them has no halves.
    wide = bits if bits.itemsize > 2 else bits.astype(np.uint32)
    halves = np.ascontiguousarray(wide).view(np.uint32)
    numbers = np.random.default_rng(_SEED).integers(1, 1 << 63, halves.shape[1], np.uint64)
    # NumPy multiplies integer matrices column by column, without a copy.
    return np.asarray(halves.astype(np.uint64) @ (2 * numbers + 1))


def divide(
    vectors: Array, hashes: Callable[[Array], npt.NDArray[np.uint64]] = _hashes
) -> tuple[Numbers, Numbers]:
    """Groups of vectors with the same bits.

    Parameters
    ----------
    vectors : ndarray of stored values, (token, hidden)
    hashes : callable
        Hash of each vector of unsigned integers; vectors may share a hash.

    Returns
    -------
    first : ndarray of int64, (group)
        Index of the first vector of each group.
    group : ndarray of int64, (token)
        The group of each vector.
    """
    bits = unsigned_view(np.ascontiguousarray(vectors))
    _, first, group = np.unique(hashes(bits), return_index=True, return_inverse=True)
    if not np.array_equal(bits[first[group]], bits):
        whole = bits.view(f"V{bits.shape[1] * bits.itemsize}").ravel()
        _, first, group = np.unique(whole, return_index=True, return_inverse=True)
    return first.astype(np.int64), group.astype(np.int64)


def smallest_members(group: Numbers, count: int, labels: Numbers) -> Numbers:
    """Smallest label in the group of each token."""
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, group, labels)
    return least[group]


def _membership(vectors: Array, labels: Numbers, members: Numbers) -> Numbers:
    """Group of each token, (token); −1 for tokens outside `members`."""
    result = np.full(len(labels), -1, np.int64)
    if members.size:
        vectors = vectors if members.size == len(labels) else vectors[members]
        first, group = divide(vectors)
        result[members] = smallest_members(group, first.size, labels[members])
    return result


def _sizes(ids: Numbers) -> Numbers:
    """Sizes of the groups of one row, including single tokens, largest first."""
    ordered = np.sort(ids)
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: ids.size])
    return np.asarray(np.sort(np.diff(starts, append=ids.size))[::-1])


def _group_statistics(
    ids: Numbers, groups: npt.NDArray[np.bool_], record: np.dtype[Any]
) -> npt.NDArray[np.void]:
    """Group statistics of each population, (population)."""
    result = np.zeros(len(groups), record)
    result["herfindahl"] = np.nan
    ranks = record["group_sizes"].shape[0]
    for statistics, group in zip(result, groups, strict=True):
        sizes = _sizes(ids[group])
        if not sizes.size:
            continue
        several = sizes[sizes > 1]
        statistics["groups"], statistics["singles"] = several.size, sizes.size - several.size
        statistics["group_sizes"][: several[:ranks].size] = several[:ranks]
        statistics["herfindahl"] = np.square(sizes / sizes.sum()).sum()
    return result


def _bonds(before: Numbers, now: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Bonds: tokens that share a group in both rows.

    Returns the old group, new group and size of each bond, and the bond of each token. A token that
    shares both groups with no other token has a bond of size 1.
    """
    olds, old = np.unique(before, return_inverse=True)
    news, new = np.unique(now, return_inverse=True)
    pairs, bond, sizes = np.unique(old * news.size + new, return_inverse=True, return_counts=True)
    return olds[pairs // news.size], news[pairs % news.size], sizes, bond


def _largest(owner: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
    """True for the largest bond of each group (the first of several) with two tokens or more."""
    order = np.lexsort((np.arange(sizes.size), -sizes, owner))
    first = np.ones(order.size, bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    result = np.zeros(order.size, bool)
    result[order] = first & (sizes[order] > 1)
    return result


def _events_of_row(before: Numbers, now: Numbers) -> list[int]:
    """Number of groups of two tokens or more with each of `EVENTS`."""
    if np.array_equal(before, now):
        return [0] * len(EVENTS)
    old, new, sizes, _ = _bonds(before, now)
    counts = {}
    for name, owner, ids in (("old", old, before), ("new", new, now)):
        groups, members = np.unique(ids, return_counts=True)
        lasting, bonds = np.unique(owner[sizes > 1], return_counts=True)
        born = np.count_nonzero((members > 1) & ~np.isin(groups, lasting))
        counts[name] = int(born), int(np.count_nonzero(bonds > 1))
    (death, fission), (birth, merge) = counts["old"], counts["new"]
    return [birth, merge, fission, death]


def _events(now: Numbers, before: Numbers, known: bool, groups: npt.NDArray[np.bool_]) -> Numbers:
    """`EVENTS` of each population, (population, event); −1 without a previous row."""
    if not known:
        return np.full((len(groups), len(EVENTS)), -1)
    return np.array([_events_of_row(before[group], now[group]) for group in groups])


def _moves(now: Numbers, before: Numbers, known: bool, leaving: bool) -> Numbers:
    """Group that each token left or joined, (token); −1 if none."""
    result = np.full(now.shape, -1, np.int64)
    if not known or np.array_equal(before, now):
        return result
    inside = np.nonzero(now >= 0)[0] if (now < 0).any() else slice(None)
    old, new, sizes, bond = _bonds(before[inside], now[inside])
    stays = _largest(old if leaving else new, sizes)[bond]
    mine = (before if leaving else now)[inside]
    _, group, members = np.unique(mine, return_inverse=True, return_counts=True)
    result[inside] = np.where((members[group] > 1) & ~stays, mine, -1)
    return result


def token_labels(ds: xr.Dataset) -> Numbers:
    """Label of each token: the coordinate ``token``, or its position if it is missing."""
    if "token" in ds.coords and np.issubdtype(ds["token"].dtype, np.integer):
        return np.asarray(ds["token"].values, np.int64)
    return np.arange(ds.sizes["token"])


@quantity()
def clusters(
    scan: Scan, population: str | None = None, lattice: str = "native", ranks: Count = 10
) -> xr.Dataset:
    """Groups of tokens with bit-identical vectors: number, sizes, and changes between rows.

    Tokens that share a group in two consecutive rows have a bond. A group of two or more tokens is
    *born* if none of its tokens were together in the previous row, and *dies* if none of them stay
    together. A *merge* holds two or more bonds; a *fission* splits into two or more.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : str, optional
        A single population. Groups then consist of its tokens only, and the result has no dimension
        population.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type.
    ranks : int
        Number of largest groups in ``group_sizes``.

    Returns
    -------
    Dataset
        int64 (step, token): ``cluster``, the group of a token, named by the smallest ``token`` in
        it (the token itself if single; −1 outside the population); ``left``, the group of the
        previous row that the token left, −1 if none; ``joined``, the group that it joined, −1 if
        none. The largest part of a group that stays together neither leaves nor joins. Of equal
        parts, the one in the group with the smallest name counts as largest.
        Over (step, population): int64 ``groups`` of two or more tokens, ``singles``,
        ``group_sizes`` (…, rank), 0 if there are fewer groups, and ``events`` (…, event), the
        number of groups with each event since the previous row, −1 in the first row (exclude it
        from sums); float64 ``herfindahl``, Σ(n_k/n)² over all groups and singles, the probability
        that two random tokens have identical vectors. −0.0 and +0.0 have different bits.

    Raises
    ------
    InvalidArgument
        For an unknown population or lattice, fewer than one rank, or if W holds values that do
        not fit ``native_dtype``.

    Examples
    --------
    >>> found = clusters(ds, "dead")
    >>> found.group_sizes.isel(step=-1, rank=slice(2)).values, found.herfindahl[-1].values.item()
    (array([118,   0]), 1.0)
    """
    names, groups = chosen_populations(scan.ds, population)
    points = scan.points(lattice)
    labels = token_labels(scan.ds)
    members = np.arange(labels.size) if population is None else np.nonzero(groups[0])[0]
    ids = measure(
        _membership,
        in_halves(points.blocks),
        dims=("step", "all_tokens"),
        labels=labels,
        members=members,
        dtype=np.int64,
        sizes={"all_tokens": labels.size},
        by_row=True,
    )
    pairs = replace(points, blocks=ids), np.arange(scan.rows) > 0
    result = {
        "cluster": scan.wrap(ids, points.variable).assign_attrs(
            long_name="group of bit-identical tokens, by its smallest token",
            **flag_attributes({-1: "outside_the_population"}),
        )
    }
    for name, leaving in (("left", True), ("joined", False)):
        moved = measure(
            _moves, *pairs, dims=("step", "token"), leaving=leaving, dtype=np.int64, by_row=True
        )
        result[name] = scan.wrap(moved, points.variable).assign_attrs(
            long_name=f"group that the token {name}", **flag_attributes({-1: "none"})
        )
    result |= _of_populations(pairs, groups, ranks)
    ds = xr.Dataset(result, coords={"step": scan.ds["step"]})
    ds = with_lattice_attributes(ds, lattice, units="1")
    ds = ds.assign_coords(population=names, rank=np.arange(1, ranks + 1), event=list(EVENTS))
    return ds.sel(population=population) if population is not None else ds


def _of_populations(
    pairs: tuple[ConsecutiveRows, Any], groups: npt.NDArray[np.bool_], ranks: int
) -> dict[Any, xr.DataArray]:
    """Variables of each population, (step, population)."""
    variables = {
        "groups": ResultVariable("i8", "groups of two or more identical tokens"),
        "singles": ResultVariable("i8", "tokens with a unique vector"),
        "herfindahl": ResultVariable("f8", "probability that two random tokens are identical"),
        "group_sizes": ResultVariable(f"({ranks},)i8", "tokens of the largest groups"),
    }
    record, sizes = record_of(variables), {"population": len(groups)}
    statistics = measure(
        _group_statistics,
        pairs[0].blocks,
        dims=("step", "population"),
        groups=groups,
        record=record,
        dtype=record,
        sizes=sizes,
        by_row=True,
    )
    sizes["event"] = len(EVENTS)
    events = measure(
        _events,
        *pairs,
        dims=("step", "population", "event"),
        groups=groups,
        dtype=np.int64,
        sizes=sizes,
        by_row=True,
    )
    result = dict(table(statistics, variables, ("step", "population", "rank"), {}).data_vars)
    result["events"] = xr.DataArray(
        events,
        dims=("step", "population", "event"),
        attrs={
            "long_name": "groups with this event since the previous row",
            **flag_attributes({-1: NO_ROW_BEFORE}),
        },
    )
    return result
