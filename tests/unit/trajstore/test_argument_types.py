"""Arguments are checked against the types of the signature."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import xarray as xr

from trajstore.arguments import Bound, Positive, checks_types
from trajstore.errors import InvalidArgument


class _NotComputed:
    """Elements of a lazy array, which no check may compute."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(dtype)

    def __getitem__(self, key: object) -> Any:
        raise AssertionError("computed")


@checks_types
def ask(
    ds: xr.Dataset | None = None,
    k: int = 1,
    share: float = 0.5,
    window: Annotated[int, Bound("of at least", 2)] | None = None,
    above: Positive = 1.0,
    name: str | None = None,
    steps: Sequence[int] | int | None = None,
    levels: Sequence[float] = (),
    names: Sequence[str] = (),
    metric: Literal["ulp", "ordinal"] = "ulp",
    since: int | Literal["previous"] = 0,
    optimizer: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str] = "",
    flag: bool = False,
    tokens: npt.ArrayLike = (),
    **rest: int,
) -> int:
    return k


@pytest.mark.parametrize(
    "given",
    [
        {"ds": xr.Dataset()},
        {"k": np.int64(3)},
        {"k": np.array(3)},
        {"k": xr.DataArray([4, 5])[1]},
        {"share": 1},
        {"window": 2, "above": 1e-9},
        {"share": Fraction(1, 3)},
        {"share": np.float32(0.5)},
        {"name": np.str_("dead")},
        {"name": xr.DataArray(["dead", "live"])[0]},
        {"steps": np.arange(3)},
        {"steps": xr.DataArray([1, 2])},
        {"steps": da.from_array(_NotComputed((3,), "i8"), chunks=3, meta=np.empty(0, "i8"))},
        {"steps": np.array([])},
        {"levels": [1, 0.5]},
        {"names": ("a", "b")},
        {"since": "previous"},
        {"optimizer": {}},
        {"path": Path()},
        {"flag": True},
        {"tokens": {1}},  # such types are not checked
        {"rest": "a"},
    ],
    ids=str,
)
def test_arguments_of_the_annotated_types_pass(given):
    assert ask(**given) == given.get("k", 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ds": xr.DataArray([1])}, "got ds=DataArray .*, expected a Dataset or None"),
        ({"k": "a"}, "got k='a', expected a whole number$"),
        ({"k": 1.5}, "got k=1.5, expected a whole number$"),
        ({"window": 1.0}, "got window=1.0, expected a whole number of at least 2 or None$"),
        ({"k": True}, "got k=True, expected a whole number$"),
        ({"k": np.array([1])}, r"got k=ndarray of shape \(1,\) and type int64, expected a whole"),
        ({"window": 1}, "got window=1, expected a whole number of at least 2 or None$"),
        ({"above": 0}, "got above=0, expected a number above 0$"),
        ({"above": np.nan}, "got above=nan, expected a number above 0$"),
        ({"share": "0.5"}, "got share='0.5', expected a number$"),
        ({"name": ["dead"]}, r"got name=\['dead'\], expected a string or None"),
        ({"steps": slice(3)}, "expected a list of whole numbers or a whole number or None"),
        ({"steps": [1.5]}, "expected a list of whole numbers"),
        ({"steps": np.zeros((2, 2), int)}, "expected a list of whole numbers"),
        ({"steps": "12"}, "expected a list of whole numbers"),
        ({"levels": 0.5}, "got levels=0.5, expected a list of numbers"),
        ({"names": "ab"}, "got names='ab', expected a list of strings"),
        ({"names": {"a": 1}}, "expected a list of strings"),
        ({"metric": "norm"}, "got metric='norm', expected 'ulp' or 'ordinal'"),
        ({"since": "first"}, "got since='first', expected a whole number or 'previous'"),
        (
            {"optimizer": "adam"},
            "optimizer='adam', expected a mapping of strings to values or None",
        ),
        ({"path": 3}, "got path=3, expected a string or a PathLike"),
        ({"flag": 1}, "got flag=1, expected True or False"),
    ],
    ids=str,
)
def test_an_argument_of_a_wrong_type_is_an_error(given, expected):
    with pytest.raises(InvalidArgument, match=expected):
        ask(**given)


def test_positional_arguments_and_errors_of_python():
    with pytest.raises(InvalidArgument, match="got k='a'"):
        ask(None, "a")
    with pytest.raises(TypeError, match="multiple values for argument 'ds'"):
        ask(None, ds=None)


def test_whole_floats_are_counts() -> None:
    for number in (3.0, np.float32(3)):
        found = ask(k=number)  # type: ignore[arg-type]
        assert (found, type(found)) == (3, int)
