"""`evaluate` calls functions with models of steps, and appends their results to a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from trainings import OwnModel

from trajstore import open_run
from trajstore.errors import InvalidArgument, RunExists, RunLocked, StepNotFound
from trajstore.schema import EVALUATION
from trajstore.trainers import evaluate
from trajstore.trainers.evaluations.evaluate import load_function
from trajstore.trainers.evaluations.result import ResultStore, check_like, step_dataset

PROBE = """\
import pathlib, torch
@torch.no_grad()
def probe(model, step):
    if pathlib.Path({folder!r}, f"fails {{step}}").exists():
        model.get_submodule("missing")
    return {{"sum": model.lm_head.weight.float().sum().item(), "name": f"step {{step}}"}}
"""


def norm(model: Any, step: int) -> dict[str, Any]:
    return {"norm": model.get_parameter("embedding.weight").detach().norm()}


def test_a_failure_keeps_the_steps_before_it_and_the_same_call_continues(
    recorded: Any, tmp_path: Path
) -> None:
    out, probe = tmp_path / "out.zarr", f"{tmp_path / 'probe.py'}:probe"
    (tmp_path / "probe.py").write_text(PROBE.format(folder=str(tmp_path)))
    (tmp_path / "fails 4").touch()
    message = r"step 4: .*probe raised AttributeError.*missing.* \(probe.py, line 5\).*up to step 3"
    with pytest.raises(InvalidArgument, match=message):
        evaluate(recorded.path, probe, out)
    assert xr.open_zarr(out)["step"].values.tolist() == [0, 1, 2, 3]
    (tmp_path / "fails 4").unlink()
    progress: list[tuple[int, int]] = []
    found = evaluate(recorded.path, probe, out, on_progress=lambda *now: progress.append(now))
    assert (found.steps, found.new, found.names) == (7, 3, ("name", "sum"))
    assert progress == [(5, 7), (6, 7), (7, 7)]
    ds = xr.open_zarr(out).load()
    assert ds["name"].values.tolist() == [f"step {step}" for step in range(7)]
    sums = [float(one["lm_head.weight"].float().sum()) for one in recorded.models]
    assert ds["sum"].values.tolist() == sums


def test_steps_of_a_constructed_model_merge_with_the_run(own: Any, tmp_path: Path) -> None:
    options: Any = {"every": 2, "constructor": OwnModel}
    found = evaluate(own.path, norm, tmp_path / "out.zarr", steps="0:5", **options)
    out = xr.open_zarr(found.path)
    both = xr.merge([open_run(own.path), out], join="inner")
    assert both["step"].values.tolist() == [0, 2, 4]
    expected = np.linalg.norm(both["W"].values.reshape(3, -1), axis=1)
    np.testing.assert_allclose(both["norm"].values, expected, rtol=1e-6)
    assert evaluate(own.path, norm, found.path, **options).new == 1  # step 6


def test_impossible_calls(own: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"every": 0}, InvalidArgument, "got every=0"),
        ({"steps": 9}, StepNotFound, "step 9 was not recorded"),
        ({"every": 4, "steps": "1:4"}, InvalidArgument, "no selected step is a multiple of 4"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            evaluate(own.path, norm, out, constructor=OwnModel, **options)
    assert not out.exists()
    evaluate(own.path, norm, out, every=3, constructor=OwnModel)
    with pytest.raises(InvalidArgument, match=r"up to step 6 but not of step 1.*overwrite=True"):
        evaluate(own.path, norm, out, constructor=OwnModel)
    assert evaluate(own.path, norm, out, overwrite=True, constructor=OwnModel).steps == 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One for files of functions; the search path is put back afterwards."""
    monkeypatch.syspath_prepend(tmp_path / "other")
    return tmp_path


MATH = """\
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from neighbor_of_probe import FACTOR
@dataclass
class Probe:
    count: ClassVar[int] = FACTOR
def made():
    return Probe()
"""


def test_a_file_runs_once_beside_a_module_of_its_name_and_imports_its_neighbors(
    folder: Path,
) -> None:
    (folder / "neighbor_of_probe.py").write_text("FACTOR = 2\n")
    (folder / "math.py").write_text(MATH)
    probe, made = (load_function(f"{folder}/math.py:{name}") for name in ("Probe", "made"))
    assert type(made()) is probe
    assert probe.count == 2
    assert load_function("math:sqrt")(4) == 2
    (folder / "math.py").write_text("def made():\n    return 5\n")
    assert load_function(f"{folder}/math.py:made")() == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("probe.py", "expected FILE.py:function"),
        ("probe.py:", "expected FILE.py:function"),
        ("missing.py:probe", "there is no file missing.py"),
        ("no_such_module:probe", "cannot import no_such_module: ModuleNotFoundError"),
        ("math:sqr", "math has no function sqr.*sqrt"),
        ("math:pi", "math has no function pi"),
        ("{folder}/broken_probe.py:probe", r"broken_probe.py: ZeroDivisionError: division"),
    ],
)
def test_a_wrong_source(source: str, message: str, folder: Path) -> None:
    (folder / "broken_probe.py").write_text("1 / 0\n")
    with pytest.raises(InvalidArgument, match=message):
        load_function(source.format(folder=folder))


# Results of steps: their form, and the store that they are appended to --------------------------


def test_every_kind_of_value_has_a_type_and_dimensions() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    token = xr.DataArray(np.ones(3, np.float32), dims="token", coords={"token": [4, 5, 6]})
    results: dict[str, tuple[Any, tuple[str, ...]]] = {
        "count": (3, ()),
        "mean": (0.5, ()),
        "text": ("a\0", ()),
        "texts": ((("layer",), ["\0", "b"]), ("layer",)),
        "plain": (np.zeros((2, 1)), ("plain_0", "plain_1")),
        "weight": (weight, ("weight_0",)),
        "named": ((("layer",), [1, 2]), ("layer",)),
        "cosine": (token, ("token",)),
    }
    ds = step_dataset({name: value for name, (value, _) in results.items()}, 7)
    assert ds["step"].values == [7]
    assert {*ds.data_vars} == {*results}
    for name, (_, dims) in results.items():
        assert ds[name].dims == ("step", *dims)
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


def at_tokens(*tokens: int) -> dict[str, Any]:
    return {"a": xr.DataArray(np.ones(2), dims="token", coords={"token": [*tokens]})}


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, "step 8: the function returned b, but a at the steps before"),
        ({"a": 1.0}, {"a": 1}, "a has type int64, but float64"),
        ({"a": 1.0}, {"a": (("x",), [1.0])}, r"a has dimensions \('x',\), but \(\)"),
        (at_tokens(1, 2), at_tokens(1, 3), "the coordinate token differs"),
    ],
)
def test_results_of_another_form_are_refused(first: Any, later: Any, message: str) -> None:
    check_like(step_dataset(first, 8), step_dataset(first, 7))
    with pytest.raises(InvalidArgument, match=message):
        check_like(step_dataset(later, 8), step_dataset(first, 7))


ABOUT = {"run": "run.zarr", "function": "probe"}


def result(step: int) -> xr.Dataset:
    array = np.full((2, 3), step, np.float32)
    return step_dataset({"a": step / 2, "t": "x" * step, "m": (("row", "column"), array)}, step)


def add(path: Path, steps: Sequence[int], about: Any = ABOUT, **options: Any) -> None:
    with ResultStore.open(path, about, **options) as store:
        for step in steps:
            store.add(result(step))


def test_appended_results_are_those_of_one_write_also_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "out.zarr"
    add(path, range(3))
    add(path, range(3, 40))
    group = zarr.open_group(path, use_consolidated=False)
    for name, rows in (("m", 49), ("step", 45), ("t", 44)):  # as a kill leaves them
        group[name].resize((rows, *group[name].shape[1:]))
    group["m"][40:] = 7
    assert xr.open_zarr(path).load()["t"].values.tolist() == ["x" * step for step in range(40)]
    add(path, [40])
    ds = xr.open_zarr(path).load()  # no warning about metadata
    expected = xr.concat([result(step) for step in range(41)], "step")
    assert ds.equals(expected)
    assert ds["m"].dtype == np.float32
    assert ds.attrs == {EVALUATION: ABOUT}


def test_results_are_written_while_others_are_computed(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path / "out.zarr", ABOUT) as store:
        store.waiting_seconds = 0
        store.add(result(0))
        assert xr.open_zarr(tmp_path / "out.zarr").sizes["step"] == 1
        with pytest.raises(RunLocked):
            add(tmp_path / "out.zarr", [])


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_a_store_of_the_version_before_is_continued_if_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.zarr"
    before = xr.concat(map(result, range(3)), "step")
    before.attrs = {EVALUATION: ABOUT, "complete_rows": 3}
    before.to_zarr(path, zarr_format=3, consolidated=False)
    with pytest.raises(InvalidArgument, match=r"cannot be continued .*as if an older version was"):
        add(path, [3])
    zarr.consolidate_metadata(path)
    add(path, [3])
    ds = xr.open_zarr(path).load()
    assert ds["t"].values.tolist() == ["", "x", "xx", "xxx"]
    assert ds.attrs == {EVALUATION: ABOUT}


def test_a_store_of_something_else_stays(tmp_path: Path) -> None:
    add(tmp_path / "out.zarr", [0])
    with pytest.raises(InvalidArgument, match="with function probe, got function other"):
        add(tmp_path / "out.zarr", [], about={**ABOUT, "function": "other"})
    add(tmp_path / "out.zarr", [5], overwrite=True)
    assert xr.open_zarr(tmp_path / "out.zarr")["step"].values.tolist() == [5]
    (tmp_path / "book").mkdir()
    for overwrite in (False, True):
        with pytest.raises(RunExists, match="not the store of an evaluation"):
            add(tmp_path / "book", [], overwrite=overwrite)
