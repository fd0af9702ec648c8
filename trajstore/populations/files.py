"""Populations from the command line: expressions, and files of masks or ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajstore.errors import FormatError, InvalidArgument
from trajstore.schema import POPULATION_FILES

if TYPE_CHECKING:
    import numpy.typing as npt


def populations_from(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse populations of the command line for `analysis.with_populations`.

    Parameters
    ----------
    assignments : sequence of str
        ``NAME=EXPRESSION`` or ``NAME=FILE``. A file holds one array, a mask or ids, in any
        supported format; or it is a ``.txt`` with one id per line, where ``#`` starts a comment.

    Returns
    -------
    dict of str to str or ndarray

    Raises
    ------
    InvalidArgument
        If a name is missing or occurs twice.
    FormatError
        If a file does not hold exactly one such array.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip() or name.strip() in result:
            raise InvalidArgument(
                f"got the population {assignment!r}, expected NAME=EXPRESSION or NAME=FILE, "
                "with unique names"
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
            lines = [line.partition("#")[0] for line in Path(path).read_text("utf-8").splitlines()]
            return np.array([int(line) for line in lines if line.strip()], np.int64)
        except ValueError as error:
            raise FormatError(f"{path}: expected one whole number per line") from error
    with open_file(path) as file:
        keys = list(file.keys)
        values = values_of(file, keys[0]) if len(keys) == 1 else None
    if values is None or values.ndim != 1 or values.dtype.kind not in "biu":
        what = "" if values is None else f" of shape {values.shape} and type {values.dtype}"
        raise FormatError(
            f"{path} holds {', '.join(keys) or 'nothing'}{what}, expected one array of one "
            "dimension with booleans or token ids"
        )
    return np.asarray(values)
