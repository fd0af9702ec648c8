"""Numbers of a file, in every common form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_files import FORMATS, stored, truth, write

import trajstore
from trajstore.errors import FormatError, InvalidArgument

KNOWN = truth()
ARRAYS = {
    key: stored(KNOWN.values[name], "float32")
    for key, name in (("W", "W"), ("g", "grad"), ("m", "exp_avg"), ("v", "exp_avg_sq"))
}


def imported(tmp_path: Path, arrays: dict[str, Any], form: str = "npz", **options: Any) -> Any:
    attributes = options.pop("attributes", {})
    file = write(tmp_path / "file", form, ARRAYS | arrays, **attributes)
    done = trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True, **options)
    return trajstore.open_run(done.path), done


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_in_arrays_of_one_value_and_pairs(tmp_path: Path, form: str) -> None:
    arrays = {
        "betas": np.array([0.9, 0.95], "f4"), "eps": np.array([1e-6], "f4"),
        "seed": np.array([7]), "learning_rate": np.array([0.01], "f4"), "threshold": np.array([3]),
        "n_runs": np.array([1]),
    }  # fmt: skip
    ds, done = imported(tmp_path, arrays, form, schedule="constant")
    rule = ds.attrs["optimizer"]["hyperparameters"]
    assert rule["betas"] == [0.9, 0.95]
    assert (rule["eps"], rule["initial_lr"]) == (1e-6, 0.01)
    assert ds.attrs["config"]["training"]["seed"] == 7
    assert ds.attrs["config"]["scalars"]["threshold"] == 3
    # The note names the defaults and no value of the file.
    assert ds.attrs["imported"]["given"]["defaults"] == {"weight_decay": 0.01}
    assert any(note.endswith("analyses that need its rule") for note in done.notes)


@pytest.mark.parametrize("form", ["hdf5", "safetensors"])
def test_numbers_in_attributes_and_texts(tmp_path: Path, form: str) -> None:
    texts = {"betas": "(0.8, 0.95)", "learning_rate": "0.001", "eps": "1e-7"}
    lists = {"betas": [0.8, 0.95], "learning_rate": np.float32(0.001), "eps": [1e-7]}
    attributes = texts if form == "safetensors" else lists | {"seed": np.array([3])}
    ds, _ = imported(tmp_path, {}, form, attributes=attributes, schedule="constant")
    rule = ds.attrs["optimizer"]["hyperparameters"]
    assert (rule["betas"], rule["eps"], rule["initial_lr"]) == ([0.8, 0.95], 1e-7, 0.001)


def test_a_text_that_is_not_read_does_not_become_a_default(tmp_path: Path) -> None:
    options: dict[str, Any] = {"attributes": {"betas": "(0.9, 0.95)", "learning_rate": 0.1}}
    with pytest.raises(InvalidArgument, match="betas is a variable-length string"):
        imported(tmp_path, {}, "hdf5", schedule="constant", **options)
    options |= {"attributes": {"betas": "(0.9, 0.95)", "learning_rate": 0.1}}
    _, done = imported(
        tmp_path, {}, "hdf5", schedule="constant", map={"ignore": "betas"}, **options
    )
    assert any("omitted: betas" in note for note in done.notes)


def test_one_beta_alone_wins_over_its_default(tmp_path: Path) -> None:
    arrays = {"adam_beta2": 0.95, "learning_rate": 0.01}
    ds, done = imported(tmp_path, arrays, schedule="constant")
    assert ds.attrs["optimizer"]["hyperparameters"]["betas"] == [0.9, 0.95]
    assert ds.attrs["imported"]["given"]["defaults"]["adam_beta1"] == 0.9
    assert any("adam_beta1 0.9" in note for note in done.notes)


def test_contradicting_numbers_of_runs(tmp_path: Path) -> None:
    W = ARRAYS["W"]
    for arrays, message in (
        ({"n_runs": 3}, r"n_runs is 3, but W of shape \(6, 7, 3\) has 1"),
        ({"num_trials": np.array([2])}, "num_trials is 2, but W"),
    ):
        with pytest.raises(FormatError, match=message):
            imported(tmp_path, arrays)
    for arrays, message in (
        (
            {"run_0_W": W, "run_1_W": W, "n_runs": 3},
            r"n_runs is 3, but .* 2 runs \(0, 1\)",
        ),
        ({"W": np.stack([W] * 2), "seeds": np.arange(3)}, "seeds has 3 values, but W of shape"),
    ):
        file = write(tmp_path / "file", "npz", arrays)
        with pytest.raises(FormatError, match=message):
            trajstore.import_file(file, tmp_path / "run.zarr")
    _, done = imported(tmp_path, {"seeds": np.arange(3)})
    assert {line.name: line.kind for line in done.table}["seeds"] == ""


@pytest.mark.parametrize("named", ["loss", "g"])
def test_no_array_is_guessed_as_W_next_to_named_ones(tmp_path: Path, named: str) -> None:
    arrays = {"hessian": ARRAYS["W"], named: stored(KNOWN.values["loss"], "float32")}
    if named == "g":
        arrays["g"] = ARRAYS["g"]
    file = write(tmp_path / "file", "npz", arrays)
    with pytest.raises(FormatError, match=r"hessian of shape \(6, 7, 3\) .* --map W=hessian"):
        trajstore.import_file(file, tmp_path / "run.zarr")
    done = trajstore.import_file(file, tmp_path / "run.zarr", map={"W": "hessian"})
    assert "W" in done.variables
    # A single array is taken as W, with a note.
    file = write(tmp_path / "file", "npz", {"hessian": ARRAYS["W"], "steps": KNOWN.steps})
    done = trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert done.notes[0].startswith("hessian was taken as W because of its shape alone")
