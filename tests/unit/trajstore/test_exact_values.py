"""Values that a caller passes are stored exactly, or refused with the value and its place."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore import RunWriter, export, import_file, open_run
from trajstore.analysis import with_populations
from trajstore.errors import InvalidArgument, StepNotFound, TrajstoreError
from trajstore.exact_values import exact, exact_json, exact_step
from trajstore.store.writing.annotated_run import annotate_run

NAN = float("nan")
W = np.ones((2, 3), "float32")

NOT_WHOLE = {
    "float": [1.5, 0],
    "whole float": [1.0, 0],
    "NaN": [NAN, 0],
    "bool": [True, 0],
    "text": ["1", "0"],
    "None": [None, 0],
    "negative": [-1, 0],
    "above int64": [2**63, 0],
    "uint64": np.array([2**63, 0], "uint64"),
    "complex": [1j, 0],
    "masked": np.ma.array([1, 0], mask=[True, False]),
    "array of float": np.array([1.5, 0]),
    "array of bool": np.array([True, False]),
}
NOT_MASK = {
    "float": [0.3, 1],
    "NaN": [NAN, 1],
    "2": [2, 0],
    "-1": [-1, 0],
    "text": ["True", "False"],
    "None": [None, True],
    "array of uint8": np.array([255, 0], "uint8"),
}
NOT_TEXT = {
    "number": ["a", 3],
    "bytes": [b"a", b"b"],
    "None": ["a", None],
    "surrogate": ["a", "\ud800"],
}
NOT_JSON = {
    "NaN": {"a": NAN},
    "infinity": {"a": [1.0, float("inf")]},
    "float32": {"a": np.float32(0.1)},
    "int64": {"a": np.int64(1)},
    "bool_": {"a": np.bool_(True)},
    "array": {"a": np.zeros(2)},
    "int key": {1: "a"},
    "inner int key": {"a": {1: "a"}},
    "tuple": {"betas": (0.9, 0.99)},
    "set": {"a": {1}},
    "object": {"a": object()},
}
NOT_COUNT = {"float": 2.0, "bool": True, "zero": 0, "negative": -1, "text": "2", "NaN": NAN}
NOT_FLAG = {"number": 1, "text": "yes", "None": None}
NOT_W = {
    "float64": np.full((2, 3), 0.1),
    "integers": np.ones((2, 3), int),
    "bool": np.ones((2, 3), bool),
    "text": np.full((2, 3), "1"),
    "complex": np.ones((2, 3), complex),
    "masked": np.ma.array(W, mask=W > 0),
    "other shape": np.ones((3, 2), "float32"),
    "None": None,
}
NOT_STEP = {
    "float": 2.9,
    "whole float": np.float64(2),
    "bool": True,
    "text": "2",
    "NaN": NAN,
    "negative": -1,
    "above int64": 2**63,
    "None": None,
    "list": [2],
}

CREATE = {
    "token": NOT_WHOLE | {"above int32": [2**31, 0], "far above": [10**10, 1], "repeated": [1, 1]},
    "token_count": NOT_WHOLE,
    "is_dead": NOT_MASK,
    "token_text": NOT_TEXT,
    "populations": {name: {"is_x": mask} for name, mask in NOT_MASK.items()},
    "config": NOT_JSON,
    "attributes": NOT_JSON,
    **dict.fromkeys(("hidden", "examples", "positions"), NOT_COUNT),
    **dict.fromkeys(("block_rows", "threads", "buffers"), NOT_COUNT),
    "lengths": {name: {"element": value} for name, value in NOT_COUNT.items()},
    "memory": {"float": 1.5, "bool": True, "NaN": NAN, "text": "much", "zero": 0},
    "commit_every": {"NaN": NAN, "zero": 0, "text": "1", "bool": True},
    **dict.fromkeys(("overwrite", "fsync"), NOT_FLAG),
    "variables": {"list": ["W"], "number": {"W": 32}, "unknown": {"weights": "float32"}},
    "encoding": {"unknown": "replay", "number": 1},
}  # fmt: skip
RESUME = {
    "rows": {"float": 1.0, "bool": True, "text": "1", "negative": -1, "too many": 2},
    "attributes": NOT_JSON,
    "threads": NOT_COUNT,
}
EXPORT = {
    "steps": {name: [value] for name, value in NOT_STEP.items()}
    | {"one float": 2.9, "one bool": True, "slice of floats": slice(0.5, 2.5)},
    "tokens": NOT_WHOLE | {"one number": 1},
    "block_rows": NOT_COUNT,
    "overwrite": NOT_FLAG,
}
IMPORT = {
    "first_row": {"float": 1.0, "bool": True, "two": 2, "text": "1"},
    "block_rows": NOT_COUNT,
    "overwrite": NOT_FLAG,
}


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}: {what}")
        for name, values in table.items()
        for what, value in values.items()
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("exact") / "run.zarr"
    with RunWriter.create(path, token=[0, 1], hidden=3, variables={"W": "float32"}) as writer:
        writer.append(step=0, W=W)
    return path


@pytest.mark.parametrize(("name", "value"), cases(CREATE))
def test_create_refuses_what_it_cannot_store(name, value, tmp_path):
    given = {"token": [0, 1], "hidden": 3, "variables": {"W": "float32"}} | {name: value}
    with pytest.raises(InvalidArgument):
        RunWriter.create(tmp_path / "run.zarr", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), cases({"step": NOT_STEP, "W": NOT_W}))
def test_append_refuses_what_it_cannot_store(name, value, tmp_path):
    with RunWriter.create(
        tmp_path / "run.zarr", token=[0, 1], hidden=3, variables={"W": "float32"}
    ) as writer:
        with pytest.raises(InvalidArgument):
            writer.append(**({"step": 1, "W": W} | {name: value}))
        assert writer.rows == 0
        writer.append(step=1, W=W)


@pytest.mark.parametrize(("name", "value"), cases(RESUME))
def test_resume_refuses_what_it_cannot_store(name, value, run):
    with pytest.raises(InvalidArgument):
        RunWriter.resume(run, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    cases({"is_dead": NOT_MASK, "token_count": NOT_WHOLE, "token_text": NOT_TEXT}),
)
def test_annotate_refuses_what_it_cannot_store(name, value, run):
    with pytest.raises(InvalidArgument):
        annotate_run(run, **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(EXPORT))
def test_export_refuses_a_selection_that_does_not_fit(name, value, run, tmp_path):
    with pytest.raises((InvalidArgument, StepNotFound)):
        export(run, tmp_path / "part.safetensors", **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(IMPORT))
def test_import_refuses_numbers_that_do_not_fit(name, value, tmp_path):
    np.save(tmp_path / "W.npy", np.ones((4, 2, 3), "float32"))
    with pytest.raises(InvalidArgument):
        import_file(tmp_path / "W.npy", tmp_path / "run.zarr", **{name: value})


@pytest.mark.parametrize("mask", NOT_MASK.values(), ids=NOT_MASK)
def test_import_refuses_masks_other_than_0_and_1(mask, tmp_path):
    np.save(tmp_path / "W.npy", np.ones((4, 2, 3), "float32"))
    np.savez(
        tmp_path / "masks.npz", dead_mask=np.asarray(mask, None if None not in mask else float)
    )
    with pytest.raises(TrajstoreError):
        import_file(tmp_path / "W.npy", tmp_path / "run.zarr", masks=tmp_path / "masks.npz")


@pytest.mark.parametrize(
    "value",
    [
        [True, 1],
        ["a", 1],
        [0.5, 1],
        [0, 7],
        [2**70, 1],
        np.array([2**64 - 1], "uint64"),
        [None, "a"],
    ],
    ids=str,
)
def test_populations_refuse_what_is_neither_mask_ids_nor_labels(value, run):
    with pytest.raises(InvalidArgument):
        with_populations(open_run(run), group=value)


def test_the_message_names_value_position_and_what_fits():
    with pytest.raises(
        InvalidArgument, match=r"^is_dead: got 0\.3 at position 1, expected True or"
    ):
        exact("is_dead", [1, 0.3], "bool")
    with pytest.raises(InvalidArgument, match=r"got 10000000000 at position 0, .* 0 to 2147483647"):
        exact("token", [10**10, 1], "int32")
    with pytest.raises(
        InvalidArgument, match=r"got an array of shape .*, expected one dimension of"
    ):
        exact("token", np.zeros((2, 2), int), "int32")
    with pytest.raises(InvalidArgument, match=r"config\.a\[1\]: got inf, expected a finite number"):
        exact_json("config", {"a": [1, float("inf")]})


def test_a_circle_is_no_json():
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InvalidArgument, match="nested at most 100 deep"):
        exact_json("config", circle)


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
    ids=str,
)
def test_what_fits_is_kept(values, dtype, expected):
    found = exact("values", values, dtype)
    assert found.tolist() == expected
    assert dtype == "string" or found.dtype == dtype


def test_a_step_can_be_a_number_of_numpy():
    assert exact_step(np.array(3)) == exact_step(np.uint8(3)) == 3


def test_byte_order_and_final_zeros_of_texts_are_kept(tmp_path):
    with RunWriter.create(
        tmp_path / "run.zarr",
        token=[0, 1],
        hidden=3,
        variables={"W": "float32"},
        token_text=["\0", "a\0"],
        config={"a": [1, 2.5, None, True, {"b": "c"}]},
    ) as writer:
        writer.append(step=0, W=W.astype(">f4"))
    ds = open_run(tmp_path / "run.zarr")
    np.testing.assert_array_equal(ds.W.values[0], W)
    assert ds.token_text.values.tolist() == ["\0", "a\0"]
    assert ds.attrs["config"] == {"a": [1, 2.5, None, True, {"b": "c"}]}
