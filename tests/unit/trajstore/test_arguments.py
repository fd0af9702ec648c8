"""Arguments are checked against the types of the signature."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import xarray as xr

from trajstore import RunWriter, export, import_file, open_run
from trajstore.arguments import Bound, Positive, checks_types, exact, exact_json, exact_step
from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.store.writing.create import annotate_run
from trajstore.strict_json import changes, parse, same
from trajstore.units import format_bytes, format_duration, parse_bytes


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


LAZY = da.zeros(3, "i8").map_blocks(pytest.fail, meta=np.empty(0, "i8"))  # never computed
FITTING = {
    "ds": [xr.Dataset()],
    "share": [1, Fraction(1, 3), np.float32(0.5)],
    "window": [2],
    "above": [1e-9],
    "name": [np.str_("dead"), xr.DataArray(["dead", "live"])[0]],
    "steps": [np.arange(3), xr.DataArray([1, 2]), LAZY, np.array([])],
    "levels": [[1, 0.5]],
    "names": [("a", "b")],
    "since": ["previous"],
    "optimizer": [{}],
    "path": [Path()],
    "flag": [True],
    "tokens": [{1}],  # such types are not checked
    "rest": ["a"],
}


def test_arguments_of_the_annotated_types_pass():
    for name, values in FITTING.items():
        for value in values:
            assert ask(**{name: value}) == 1
    for number in (np.int64(3), np.array(3), xr.DataArray([4, 3])[1]):
        assert ask(k=number) == 3
    for number in (3.0, np.float32(3)):  # whole floats are counts
        found = ask(k=number)
        assert (found, type(found)) == (3, int)


LIST = "expected a list of whole numbers or a whole number or None"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("ds", [xr.DataArray([1])], "got ds=DataArray .*, expected a Dataset or None"),
        ("k", ["a", 1.5, True], "got k=('a'|1.5|True), expected a whole number$"),
        ("k", [np.array([1])], r"got k=ndarray of shape \(1,\) and type int64"),
        ("window", [1, 1.0], "expected a whole number of at least 2 or None$"),
        ("above", [0, np.nan], "expected a number above 0$"),
        ("share", ["0.5"], "expected a number$"),
        ("name", [["dead"]], "expected a string or None"),
        ("steps", [slice(3), [1.5], np.zeros((2, 2), int), "12"], LIST),
        ("levels", [0.5], "expected a list of numbers"),
        ("names", ["ab", {"a": 1}], "expected a list of strings"),
        ("metric", ["norm"], "got metric='norm', expected 'ulp' or 'ordinal'"),
        ("since", ["first"], "expected a whole number or 'previous'"),
        ("optimizer", ["adam"], "expected a mapping of strings to values or None"),
        ("path", [3], "expected a string or a PathLike"),
        ("flag", [1], "expected True or False"),
    ],
)
def test_an_argument_of_a_wrong_type_is_an_error(name, values, expected):
    for value in values:
        with pytest.raises(InvalidArgument, match=expected):
            pytest.fail(f"{value!r}: {ask(**{name: value})}")


def test_positional_arguments_and_errors_of_python():
    with pytest.raises(InvalidArgument, match="got k='a'"):
        ask(None, "a")
    with pytest.raises(TypeError, match="multiple values for argument 'ds'"):
        ask(None, ds=None)


NAN = float("nan")
W = np.ones((2, 3), "float32")
PLAIN = {"token": [0, 1], "hidden": 3, "variables": {"W": "float32"}}

NOT_EXACT = {
    "int64": (
        [1.0, 0],
        [True, 0],
        ["1", "0"],
        [-1, 0],
        [2**63, 0],
        1,
        np.array([2**63, 0], "uint64"),
        np.ma.array([1, 0], mask=[True, False]),
        np.array([True, False]),
        np.zeros((2, 2), int),
    ),
    "int32": ([2**31, 0], [10**10, 1]),
    "bool": ([NAN, 1], [2, 0], ["True", "False"], np.array([255, 0], "uint8")),
    "string": (["a", 3], [b"a", b"b"], ["a", "\ud800"]),
}
NOT_JSON = (
    {"a": NAN},
    {"a": np.float32(0.1)},
    {"a": np.zeros(2)},
    {1: "a"},
    {"a": {1: "a"}},
    {"a": {1}},
    {"a": object()},
)
NOT_STEP = (2.9, np.float64(2), True, "2", -1, 2**63, None, [2])
CALLS = {
    "create": {
        "token": [[1.0, 0], [2**31, 0], [1, 1]],
        "token_count": [[True, 0]],
        "is_dead": [[0.3, 1]],
        "token_text": [["a", 3]],
        "populations": [{"is_x": [2, 0]}],
        "config": [{"betas": (0.9, 0.99)}],
        "attributes": [{1: "a"}],
        **dict.fromkeys("hidden examples positions block_rows threads buffers".split(), (2.5,)),
        "lengths": [{"element": True}],
        "memory": [1.5, NAN, 0],
        "commit_every": [NAN, 0],
        **dict.fromkeys(("overwrite", "fsync"), (1,)),
        "variables": [["W"], {"W": 32}, {"weights": "float32"}],
        "encoding": ["unknown"],
    },
    "append": {
        "step": [2.9],
        "W": [
            np.ones((2, 3), complex),
            np.full((2, 3), "1"),
            np.ma.array(W, mask=W > 0),
            W.T,
            None,
        ],
    },
    "resume": {"rows": [1.5, -1, 2], "attributes": [{"a": {1}}], "threads": [2.5]},
    "annotate": {"is_dead": [[2, 0]], "token_count": [[1.0, 0]], "token_text": [["a", None]]},
    "export": {
        "steps": [[2.9], 2.9, True, slice(0.5, 2.5)],
        "tokens": [[1.0, 0], 1],
        "block_rows": [2.5],
        "overwrite": [1],
    },
    "import": {"first_row": [1.5, 2], "block_rows": [2.5], "overwrite": [1]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("exact") / "run.zarr"
    with RunWriter.create(path, **PLAIN) as writer:
        writer.append(step=0, W=W)
    return path


@pytest.mark.parametrize(
    ("name", "check", "values"),
    [
        *(("token", partial(exact, "token", dtype=dtype), NOT_EXACT[dtype]) for dtype in NOT_EXACT),
        ("config", partial(exact_json, "config"), NOT_JSON),
        ("step", exact_step, NOT_STEP),
    ],
)
def test_values_that_would_change_are_refused(name, check, values):
    for value in values:
        with pytest.raises(InvalidArgument, match=rf"^{name}.*: got "):
            pytest.fail(f"{value!r}: {check(value)}")


@pytest.mark.parametrize("call", CALLS)
def test_functions_refuse_what_they_cannot_store(call, run, tmp_path):
    np.save(tmp_path / "W.npy", np.ones((4, 2, 3), "float32"))
    new = tmp_path / "new.zarr"
    with RunWriter.create(tmp_path / "run.zarr", **PLAIN) as writer:
        calls = {
            "create": lambda **given: RunWriter.create(new, **PLAIN | given),
            "append": lambda **given: writer.append(**{"step": 1, "W": W} | given),
            "resume": partial(RunWriter.resume, run),
            "annotate": partial(annotate_run, run),
            "export": partial(export, run, tmp_path / "part.safetensors"),
            "import": partial(import_file, tmp_path / "W.npy", new),
        }
        for name, values in CALLS[call].items():
            for value in values:
                with pytest.raises((InvalidArgument, StepNotFound)):
                    pytest.fail(f"{name}={value!r}: {calls[call](**{name: value})}")
        assert writer.rows == 0
        writer.append(step=1, W=W)
    assert {path.name for path in tmp_path.iterdir()} == {"W.npy", "run.zarr"}


def test_the_message_names_value_position_and_what_fits():
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InvalidArgument, match=r"got 10000000000 at position 0, .* 0 to 2147483647"):
        exact("token", [10**10, 1], "int32")
    for value, message in (
        ([1, float("inf")], r"config\.a\[1\]: got inf, expected a finite number"),
        (circle, "nested at most 100 deep"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            exact_json("config", {"a": value})


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, np.int8(0)], "int64", [1, 0]),
        (np.array([1, 0], ">i4"), "int32", [1, 0]),
        (np.array([1, 0], "uint64"), "int64", [1, 0]),
        (range(2), "int32", [0, 1]),
        ([2**63 - 1], "int64", [2**63 - 1]),
        ([True, 0, 1.0], "bool", [True, False, True]),
        (np.array([1, 0], "uint8"), "bool", [True, False]),
        (["a\0", ""], "string", ["a\0", ""]),
        ([], "int32", []),
    ],
)
def test_what_fits_is_kept(values, dtype, expected):
    found = exact("values", values, dtype)
    assert found.tolist() == expected
    assert dtype == "string" or found.dtype == dtype
    assert exact_step(np.array(3)) == exact_step(np.uint8(3)) == 3


def test_byte_order_and_final_zeros_of_texts_are_kept(tmp_path):
    path, texts = tmp_path / "run.zarr", ["\0", "a\0"]
    config = {"a": [1, 2.5, None, True, {"b": "c"}]}
    with RunWriter.create(path, **PLAIN, token_text=texts, config=config) as writer:
        writer.append(step=0, W=W.astype(">f4"))
    ds = open_run(path)
    np.testing.assert_array_equal(ds.W.values[0], W)
    assert (ds.token_text.values.tolist(), ds.attrs["config"]) == (texts, config)


def test_sizes_are_read_and_printed() -> None:
    sizes = {"1GiB": 1 << 30, "1.5 MiB": 3 << 19, "8MB": 8_000_000, "77": 77, "1kib": 1024}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert [format_bytes(size) for size in (1536, 0, 5 << 30)] == ["1.5 KiB", "0 B", "5 GiB"]
    for text in (1.5, 0, "GiB", "-1GiB", "1 apple", "inf"):
        with pytest.raises(InvalidArgument, match="got size"):
            parse_bytes(text)


def test_a_duration_has_its_two_largest_units() -> None:
    texts = {
        -3: "0 s", 0.9999: "1.0 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min", 3599.7: "1 h",
        86_399.9: "1 d",
    }  # fmt: skip
    assert {seconds: format_duration(seconds) for seconds in texts} == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "a name occurs twice"),
        ('{"a": [NaN, -Infinity]}', "NaN is not a JSON value"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
    ],
)
def test_what_json_does_not_allow_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
    assert parse("[" * 100 + "]" * 100)


def test_differences_are_named_by_their_place() -> None:
    one = {"a": 1, "codecs": [{"name": "x"}, {"name": "y"}], "gone": 0}
    other = {"a": 1, "codecs": [{"name": "z"}, {"name": "y"}], "new": 0}
    assert [place for place, *_ in changes(one, other)] == ["codecs.0.name", "gone", "new"]
    assert changes(one, one) == []
    assert changes({"a": [1, 2]}, {"a": [1]}) == [("a", [1, 2], [1])]
    assert same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert (same(1, 1.0), same(1, True)) == (False, False)
