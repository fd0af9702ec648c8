"""Detection of formats, and folders of one file per step."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import trajstore
from trajstore.errors import FormatError
from trajstore.exchange.usual_names import ARRAY_KINDS
from trajstore.formats.open_file import STEPS, common_numbers, numbers_of_steps, open_file
from trajstore.schema import STEP

DEAD = np.array([True, False, False, True])
FLAGS = np.array([1, 0, 3, 0], "u1").view(bool)  # no labels, so any byte is allowed


def test_what_differs_and_what_does_not() -> None:
    files_of_numbers = [
        {"seed": 1, "note": "a"},
        {"seed": 1, "note": "b", "loss": 2, "lr": "0.5", "a.b": 1},
        {"seed": 1, "loss": 3.5, "lr": "0.25", "a.b": 2},
    ]
    assert common_numbers(files_of_numbers) == {"seed": 1}
    series, left = numbers_of_steps(files_of_numbers, "file {}".format)
    found = {key: rows.tolist() for key, rows in series.items()}
    assert found == {"loss": [2, 3.5], "lr": [0.5, 0.25]}
    assert left == {"note": "not a number, and it differs between files"}
    files_of_numbers[2].pop("loss")
    series, left = numbers_of_steps(files_of_numbers, "file {}".format)
    assert np.isnan(series["loss"][1])
    assert left["loss of file 2"] == "missing, so NaN in the run"
    with_large = [{"n": 1 << 63}, {"n": 2}]
    assert numbers_of_steps(with_large, str) == ({}, {"n": "a number too large"})


def files(path: Path) -> Path:
    path.mkdir()
    for step in (0, 10, 20):
        W = np.full((4, 3), step, "f4")
        loss = {"loss": np.array([5 - step / 10], "f4")} if step else {}  # an axis of one
        np.savez(
            path / f"step_{step:05}.npz",
            W=W, dead_mask=DEAD, vocab_size=4, learning_rate=1e-3, step=step, **loss,
            odd=np.array([None]), flags=FLAGS,
        )  # fmt: skip
    np.savez(path / "step_final.npz", W=W)
    (path / "notes_3.md").write_text("mine")
    return path


def test_masks_and_numbers_in_each_file(tmp_path: Path) -> None:
    done = trajstore.import_file(files(tmp_path / "steps"), tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path).load()
    assert ds.step.values.tolist() == [0, 10, 20]
    assert (ds.is_dead.values == DEAD).all()
    assert np.allclose(ds.loss.values, [np.nan, 4, 3], equal_nan=True)
    assert ds.attrs["optimizer"]["hyperparameters"]["initial_lr"] == 1e-3
    left = {line.name: line.why for line in done.table if not line.kind}
    assert "flags" in left
    assert left["step_final.npz"] == "no step in its name"
    assert left["notes_3.md"] == "by its ending, not a file of arrays"
    assert "Python objects" in left["odd of step_00000.npz and 2 more files"]
    assert any("step_final.npz" in note for note in done.notes)


def test_many_unread_files_are_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "W_0.npy", np.ones((4, 3), "f4"))
    for number in range(30):
        (tmp_path / f"log-{number}.txt").write_text("")
    with open_file(tmp_path) as file:
        assert len(file.unread) == 21
        assert file.unread["10 more files"] == "also not files of steps"


def test_masks_that_differ_from_file_to_file(tmp_path: Path) -> None:
    for step, mask in enumerate((DEAD, ~DEAD)):
        np.savez(tmp_path / f"step_{step}.npz", W=np.ones((4, 3), "f4"), dead_mask=mask)
    with pytest.raises(FormatError, match=r"dead_mask .* differs between files"):
        trajstore.import_file(tmp_path, tmp_path / "run.zarr")


ROWS = {step: np.full((4, 3), step + 0.5, "f4") for step in (0, 100, 50)}


def folder(path: Path) -> Path:
    path.mkdir()
    for step, W in ROWS.items():
        arrays = {"W": W, "loss": np.array(step, "f4")}
        if step:
            arrays["grad"] = W
        save_file(arrays, path / f"step_{step:05}.safetensors", metadata={"seed": "42"})
    (path / "notes.txt").write_text("mine")
    return path


def test_one_file_per_step(tmp_path: Path) -> None:
    with open_file(folder(tmp_path / "steps")) as file:
        assert file.read(STEPS).tolist() == [0, 50, 100]
        assert file.shape("W") == (3, 4, 3)
        assert file.shape("grad") == (2, 4, 3)
        assert (file.read("W", 1, 3).view("f4")[:, 0, 0] == [50.5, 100.5]).all()
        assert file.attributes == {"seed": "42"}
    done = trajstore.import_file(tmp_path / "steps", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path).load()
    assert ds.loss.values[1:].tolist() == [50, 100]
    assert np.isnan(ds.grad.values[0]).all()
    assert (ds.grad.values[2] == 100.5).all()
    assert ds.attrs["config"]["training"]["seed"] == 42
    assert ds.attrs["imported"]["file"] == "steps"


def test_files_that_are_named_by_their_steps_alone(tmp_path: Path) -> None:
    steps = dict.fromkeys({*ARRAY_KINDS[STEP.name].names} - {"steps_of_the_names"}, "W")
    for name, key in (steps | {"weights": "weights"}).items():
        (tmp_path / name).mkdir()
        for step, W in ROWS.items():
            np.save(tmp_path / name / f"{name}_{step:05}.npy", W)
        with open_file(tmp_path / name) as file:
            assert file.keys == (STEPS, key)
            assert (file.read(key).view("f4")[:, 0, 0] == [0.5, 50.5, 100.5]).all()


def test_a_number_that_no_step_has_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / f"W_{'9' * 23}.npy", ROWS[0])
    with pytest.raises(FormatError, match=r"W_9+\.npy: got step 9+, expected at most"):
        trajstore.import_file(tmp_path, tmp_path / "run.zarr")


@pytest.mark.torch
def test_checkpoints_of_a_trainer(tmp_path: Path) -> None:
    import torch

    for step, W in ROWS.items():
        path = tmp_path / "out" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        other = np.ones((3, 3), "f4")
        tensors = {"transformer.wte.weight": W, "transformer.h.0.attn.c_attn.weight": other}
        save_file(tensors, path / "model.safetensors")
        state = {
            0: {"exp_avg": torch.full((4, 3), 0.25), "step": torch.tensor(float(step))},
            1: {"exp_avg": torch.zeros(3, 3), "step": torch.tensor(float(step))},
        }
        torch.save({"state": state, "param_groups": [{"lr": 1e-3}]}, path / "optimizer.pt")
    done = trajstore.import_file(tmp_path / "out", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path).load()
    assert ds.step.values.tolist() == [0, 50, 100]
    assert (ds.W.values[:, 0, 0] == [0.5, 50.5, 100.5]).all()
    assert (ds.exp_avg.values == 0.25).all()
    taken = {line.name: line for line in done.table}
    assert taken["transformer.h.0.attn.c_attn.weight"].kind == ""
    assert taken["optimizer.state.1.exp_avg"].why == "belongs to another parameter"
    # One checkpoint by itself is one state.
    done = trajstore.import_file(tmp_path / "out" / "checkpoint-50", tmp_path / "one.zarr")
    assert done.rows == 1


def test_files_that_differ_are_both_named(tmp_path: Path) -> None:
    for change, message in (
        ({"W": np.ones((5, 3), "f4")}, r"shape \(4, 3\) in step_00000.*\(5, 3\) in step_00200"),
        ({"W": np.ones((4, 3), "f2")}, "W is float32 .* float16"),
        ({"V": np.ones((4, 3), "f4")}, r"step_00200.* holds V, but step_00000.* does not"),
    ):
        path = folder(tmp_path / re.sub(r"\W", "", message))
        save_file({"grad": ROWS[0], "loss": np.array(1, "f4")} | change,
                  path / "step_00200.safetensors")  # fmt: skip
        with pytest.raises(FormatError, match=message):
            open_file(path)
    save_file({"W": ROWS[0]}, path / "again_100.safetensors")
    with pytest.raises(FormatError, match="both have step 100"):
        open_file(path)
    (tmp_path / "other" / "run_4.ckpt").mkdir(parents=True)
    (tmp_path / "other" / "step_3.dat").touch()
    reasons = "no files of steps.*run_4.ckpt: a folder, .*step_3.dat: by its ending, not"
    with pytest.raises(FormatError, match=reasons):
        open_file(tmp_path / "other")
