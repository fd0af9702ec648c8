"""Populations as they are given on the command line: expressions, and files of masks and ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajstore.errors import FormatError, InvalidArgument
from trajstore.schema import POPULATION_FILES

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["populations_from"]


def populations_from(assignments: Sequence[str]) -> dict[str, Any]:
    """Populations as the command line gives them, for `analysis.with_populations`.

    Parameters
    ----------
    assignments : sequence of str
        ``NAME=EXPRESSION`` or ``NAME=FILE``: a file of one array, mask or ids, in any format that
        is read here, or a ``.txt`` of one id in each line, and what follows a ``#`` left out.

    Returns
    -------
    dict of str to str or ndarray

    Raises
    ------
    InvalidArgument
        If there is no name, or one twice.
    FormatError
        If a file does not hold one such array.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip() or name.strip() in result:
            raise InvalidArgument(
                f"got the population {assignment!r}, expected NAME=EXPRESSION or NAME=FILE, and "
                "each name once"
            )
        text = text.strip()
        if not Path(text).is_file() and Path(text).suffix in POPULATION_FILES:
            raise InvalidArgument(f"there is no file {text} for the population {name.strip()}")
        result[name.strip()] = _from_file(text) if Path(text).is_file() else text
    return result


def _from_file(path: str) -> npt.NDArray[Any]:
    import numpy as np

    from trajstore.formats.array_file import values_of
    from trajstore.formats.open_file import open_file

    if Path(path).suffix == ".txt":
        try:
            lines = [line.partition("#")[0] for line in Path(path).read_text().splitlines()]
            return np.array([int(line) for line in lines if line.strip()], np.int64)
        except ValueError as error:
            raise FormatError(f"{path} does not hold a whole number in each line") from error
    with open_file(path) as file:
        keys = list(file.keys)
        values = values_of(file, keys[0]) if len(keys) == 1 else None
    if values is None or values.ndim != 1 or values.dtype.kind not in "biu":
        what = "" if values is None else f" of shape {values.shape} and type {values.dtype}"
        raise FormatError(
            f"{path} holds {', '.join(keys) or 'nothing'}{what}; a population is one array of one "
            "dimension, of truth values or ids"
        )
    return np.asarray(values)
