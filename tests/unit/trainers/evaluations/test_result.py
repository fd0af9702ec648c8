from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore.errors import InvalidArgument

torch = pytest.importorskip("torch")

from trajstore.trainers.evaluations.result import check_like, step_dataset  # noqa: E402

pytestmark = pytest.mark.torch


def test_every_kind_of_value_has_a_type_and_dimensions() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    token = xr.DataArray(np.ones(3, np.float32), dims="token", coords={"token": [4, 5, 6]})
    result = {
        "count": 3,
        "mean": 0.5,
        "text": "a\0",
        "texts": (("layer",), ["\0", "b"]),
        "plain": np.zeros((2, 1)),
        "weight": weight,
        "named": (("layer",), [1, 2]),
        "cosine": token,
    }
    ds = step_dataset(result, 7)
    assert ds["step"].values == [7]
    assert {str(name): da.dims for name, da in ds.data_vars.items()} == {
        "count": ("step",),
        "mean": ("step",),
        "text": ("step",),
        "texts": ("step", "layer"),
        "plain": ("step", "plain_0", "plain_1"),
        "weight": ("step", "weight_0"),
        "named": ("step", "layer"),
        "cosine": ("step", "token"),
    }
    assert (ds["weight"].dtype, ds["count"].dtype.kind) == (np.float32, "i")
    assert ds["token"].values.tolist() == [4, 5, 6]
    assert ds["text"].values.tolist() == ["a\0"]  # with its final NUL
    assert ds["texts"].values.tolist() == [["\0", "b"]]
    with torch.no_grad():
        weight.zero_()
    assert ds["weight"].values.tolist() == [[1, 1]]  # a copy


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "step 7: the function returned NoneType, expected a dict"),
        ({}, "step 7: the function returned dict, expected a dict"),
        ({"loss": 1.0}, "returned loss, which is a name of a run"),
        ({"step": 1}, "returned step, which is a name of a run"),
        ({1: 1.0}, "got the name 1, expected a string"),
        ({"a": None}, "a is NoneType, expected a number"),
        ({"a": object()}, "a is object, expected"),
        ({"a": (("x", "y"), [1.0])}, "a is tuple, expected"),
        ({"a": (("x",), [1.0]), "b": (("x",), [1.0, 2.0])}, "do not fit together"),
    ],
)
def test_other_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        step_dataset(result, 7)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"b": 1.0}, "step 8: the function returned b, but a at the steps before"),
        ({"a": 1}, "a has type int64, but float64"),
        ({"a": (("x",), [1.0])}, r"a has dimensions \('x',\), but \(\)"),
    ],
)
def test_results_of_another_form_are_refused(later: Any, message: str) -> None:
    first = step_dataset({"a": 1.0}, 7)
    check_like(step_dataset({"a": 2.0}, 8), first)
    with pytest.raises(InvalidArgument, match=message):
        check_like(step_dataset(later, 8), first)


def test_results_with_another_coordinate_are_refused() -> None:
    ones = np.ones(2)
    steps = [
        step_dataset({"a": xr.DataArray(ones, dims="token", coords={"token": token})}, 7)
        for token in ([1, 2], [1, 3])
    ]
    with pytest.raises(InvalidArgument, match="the coordinate token differs"):
        check_like(steps[1], steps[0])
