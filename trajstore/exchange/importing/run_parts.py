"""Assignment of arrays to runs, for files of several runs or of both matrices of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.errors import FormatError
from trajstore.exchange.importing.named_arrays import NamedArray, NamedArrays
from trajstore.formats.array_file import ArrayFile
from trajstore.schema import TRAJECTORIES, VARIABLES

RUN_COUNTS = tuple(
    f"{prefix}{noun}"
    for noun in ("runs", "trials", "replicates")
    for prefix in ("n_", "num_", "number_of_")
)
"""Names of the number of runs of a file."""


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """The part of a file that makes one run.

    Attributes
    ----------
    label : str
    found : tuple of NamedArray
    numbers : dict
    outer : int, optional
        Position along a first axis of runs, for arrays that have one.
    """

    label: str
    found: tuple[NamedArray, ...]
    numbers: dict[str, Any]
    outer: int | None = None


def run_parts(file: ArrayFile, content: NamedArrays) -> Iterator[RunPart]:
    """Split a file into runs, by numbers in names, a first axis, or the matrices of untied models.

    Parameters
    ----------
    file : ArrayFile
    content : NamedArrays

    Raises
    ------
    FormatError
        If arrays disagree about the number of runs, or an array belongs to an unknown run.
    """
    found = content.arrays
    anchors = [one for one in found if one.kind.name in TRAJECTORIES]
    numbered = sorted({one.run for one in anchors if one.run is not None})
    lengths = {one.key: one.shape[0] for one in found if one.extra == 1 and one.kind.is_variable}
    along = [lengths[one.key] for one in anchors if one.extra == 1]
    if along:
        for key, length in lengths.items():
            if length != along[0]:
                raise FormatError(
                    f"{file.path}: {anchors[0].key} has {along[0]} runs along its first axis, but "
                    f"{key} has {length}; omit one with --map ignore={key}"
                )
    if numbered and along:
        raise FormatError(
            f"{file.path}: {anchors[0].key} has the number of a run in its name and an axis of "
            "runs, expected only one of them"
        )
    count = len(numbered) or (along[0] if along else 1)
    what = (
        f"the names of arrays give {count} runs ({', '.join(map(str, numbered[:12]))})" if numbered
        else f"{anchors[0].key} of shape {anchors[0].shape} has {count} runs"
    )  # fmt: skip
    _check_count(file, content, count, what)
    for one in found:
        of_all = one.run is None and one.extra < 1
        if (numbered or along) and one.kind.is_variable and of_all and one.kind.name != "lr":
            raise FormatError(
                f"{file.path}: {anchors[0].key} belongs to one of {count} runs, but {one.key} has "
                f"no number of a run; omit it with --map ignore={one.key}"
            )
    matrices = sorted({one.matrix for one in anchors if one.matrix is not None})
    places: Sequence[tuple[int | None, int | None]] = (
        [(run, None) for run in numbered] if numbered
        else [(None, at) for at in range(along[0])] if along
        else [(None, None)]
    )  # fmt: skip
    for run, outer in places:
        number = run if run is not None else outer
        for matrix in matrices or (None,):
            mine = tuple(
                one for one in found
                if one.run in (None, run) and (one.matrix in (None, matrix) or not matrices)
            )  # fmt: skip
            for one in mine:
                if matrices and one.matrix is None and one.kind.dims == VARIABLES["W"].dims:
                    raise FormatError(
                        f"{file.path}: {one.key} belongs to E or W, which are untied, but its name "
                        f"does not end with _E or _W; omit it with --map ignore={one.key}"
                    )
            numbers = dict(content.numbers)
            for key, values in content.vectors.items():
                if number is not None and len(values) == len(places):
                    numbers[key] = values[outer if outer is not None else places.index((run, None))]
            used = tuple(one for one in mine if one.key not in numbers or one.kind.is_variable)
            labels = [str(each) for each in (number, matrix) if each is not None]
            yield RunPart(label=".".join(labels), found=used, numbers=numbers, outer=outer)


def _check_count(file: ArrayFile, content: NamedArrays, count: int, what: str) -> None:
    """Refuse a number of runs, or lists of one number per run, that differ from the arrays."""
    for key, value in content.numbers.items():
        if key.lower() in RUN_COUNTS and value != count:
            raise FormatError(
                f"{file.path}: {key} is {value}, but {what}; omit it with --map ignore={key}"
            )
    for key, values in content.vectors.items():
        of_rows = any(one.key == key for one in content.arrays)
        if len(values) not in (1, count) and count > 1 and not of_rows:
            raise FormatError(
                f"{file.path}: {key} has {len(values)} values, but {what}; omit it with --map "
                f"ignore={key}"
            )
