"""Files of other programs, valid and damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grammar_files import imported, stored, truth
from safetensors.numpy import save_file

import trajstore
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunNotFound
from trajstore.exchange.file_rows import check_size
from trajstore.formats.array_file import check_expansion

ROWS, TOKENS, HIDDEN = 12, 6, 4


def notebook_file(path: Path, **changes: Any) -> Path:
    """A file of the recorder of 15.1a, with changes; None omits a key."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        values = rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype("f4")
        values[0] = 0
        return values

    losses = rng.normal(size=ROWS).astype("f4")
    losses[0] = np.nan
    arrays = {
        "recorded_steps": np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13]),
        "dead_token_ids": np.array([1, 4]),
        "live_token_ids": np.array([0, 2, 3, 5]),
        "embeddings": floats(ROWS, TOKENS, HIDDEN) + 1,
        "grads": floats(ROWS, TOKENS, HIDDEN),
        "momentum": floats(ROWS, TOKENS, HIDDEN),
        "variance": floats(ROWS, TOKENS, HIDDEN),
        "logits": floats(ROWS, TOKENS),
        "losses": losses,
        "learning_rate": np.array(1e-3, "f4"),
        "adam_beta1": np.array(0.9, "f4"),
        "adam_beta2": np.array(0.999, "f4"),
        "init_sigma": np.array(1e-5, "f4"),
        "init_method_code": np.array(0, "i4"),
    } | changes
    save_file({key: array for key, array in arrays.items() if array is not None}, path)
    return path


def test_labels_that_counted_callbacks_are_corrected_with_a_note(tmp_path: Path) -> None:
    file = notebook_file(tmp_path / "f")
    done = trajstore.import_file(file, tmp_path / "run.zarr")
    ds = trajstore.open_run(tmp_path / "run.zarr")
    assert ds.step.values.tolist() == list(range(ROWS))
    assert any("counted callbacks" in note and "every 5 rows" in note for note in done.notes)
    assert ds.attrs["imported"]["notes"] == list(done.notes)


def test_an_import_adds_no_values(tmp_path: Path) -> None:
    notebook_file(tmp_path / "f", momentum=None, learning_rate=None)
    done = trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr")
    ds = trajstore.open_run(tmp_path / "run.zarr")
    assert set(ds.data_vars) == {"W", "grad", "exp_avg_sq", "logits", "loss"}
    assert set(ds.coords) == {"step", "token", "is_dead"}
    assert ds.is_dead.values.tolist() == [False, True, False, False, True, False]
    assert ds.attrs["optimizer"] == {"hyperparameters": {"betas": [0.9, 0.999]}}
    assert ds.attrs["config"] == {"initialization": {"sigma": 1e-5, "dtype": "float32"}}
    assert any("does not hold momentum" in note for note in done.notes)
    for name in ("grad", "logits", "loss"):
        assert np.isnan(ds[name].values[0]).all()


def test_float32_is_bfloat16_only_where_every_value_is(tmp_path: Path) -> None:
    file = notebook_file(tmp_path / "f")
    W = np.ones((ROWS, TOKENS, HIDDEN), "f4")
    W[-1, -1, -1] = np.nextafter(np.float32(1), np.float32(2))
    notebook_file(file, embeddings=W)
    done = trajstore.import_file(file, tmp_path / "run.zarr")
    assert done.variables["W"] == "float32"
    assert done.variables["grad"] == "bfloat16"
    assert done.variables["loss"] == "float32"
    assert (trajstore.open_run(tmp_path / "run.zarr").W.values == W).all()


def test_a_forced_layout_names_the_missing_keys(tmp_path: Path) -> None:
    notebook_file(tmp_path / "f")
    with pytest.raises(FormatError, match=r"layout 14\.1a requires deltas"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout="14.1a")
    with pytest.raises(FormatError, match="layout native requires step, token"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout="native")
    with pytest.raises(FormatError, match="layout hdf5 is for hdf5 files"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout="hdf5")
    with pytest.raises(InvalidArgument, match="no layout '15'"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout="15")


def test_options_are_refused_for_a_native_file(tmp_path: Path) -> None:
    W = np.zeros((2, 3, 1), "f4")
    save_file(
        {"step": np.arange(2), "token": np.arange(3), "W": W},
        tmp_path / "f",
        metadata={"format": "trajstore"},
    )
    save_file({"dead_ids": np.array([1])}, tmp_path / "masks")
    named = "map, bits, labels, masks, first_row"
    with pytest.raises(InvalidArgument, match=f"layout native.* {named} would have no effect"):
        trajstore.import_file(
            tmp_path / "f",
            tmp_path / "run.zarr",
            map={"ignore": "W"},
            bits="bfloat16",
            labels={"steps": "0:12"},
            first_row=0,
            masks=tmp_path / "masks",
        )
    assert not (tmp_path / "run.zarr").exists()
    trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr")


def test_the_dummy_logits_of_1_12a_are_omitted_with_a_note(tmp_path: Path) -> None:
    W = np.arange(ROWS * TOKENS * HIDDEN).reshape(ROWS, TOKENS, HIDDEN).astype("f4")
    W[1] = W[0]
    save_file(
        {"W": W, "grads": np.zeros_like(W), "logits": np.ones((ROWS, TOKENS), "f4")},
        tmp_path / "f",
        metadata={"learning_rate": "0.001", "n_layers": "2"},
    )
    done = trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout="1.12a")
    assert any("forward pass before the first step" in note for note in done.notes)
    ds = trajstore.open_run(tmp_path / "run.zarr")
    assert np.isnan(ds.logits.values[0]).all()
    assert (ds.logits.values[1:] == 1).all()
    assert (ds.W.values[:-1] == W[1:]).all()
    assert ds.attrs["config"] == {"model": {"layers": 2}}


def test_targets_and_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no file"):
        trajstore.import_file(tmp_path / "none", tmp_path / "run.zarr")
    file = notebook_file(tmp_path / "f")
    trajstore.import_file(file, tmp_path / "run.zarr")
    with pytest.raises(RunExists, match="already exists"):
        trajstore.import_file(file, tmp_path / "run.zarr")
    notebook_file(file, losses=None)
    trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")
    # A failure leaves what was there as it was.
    notebook_file(file, embeddings=None)
    with pytest.raises(FormatError):
        trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "run.zarr"]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    file = notebook_file(tmp_path / "f")
    with pytest.raises(KeyboardInterrupt):
        trajstore.import_file(file, tmp_path / "run.zarr", on_progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_rows_and_memory_are_bounded_before_anything_is_read() -> None:
    file = Path("x.h5")
    check_size(file, "W", (1 << 22, 2, 2), "float32", 1 << 20)
    with pytest.raises(FormatError, match=r"W has 4,194,305 rows, .* at most 4,194,304"):
        check_size(file, "W", ((1 << 22) + 1, 2, 2), "float32", 1 << 20)
    with pytest.raises(InvalidArgument, match=r"rows of 4 MiB; .* memory='13MiB'"):
        check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 12 << 20)
    check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 13 << 20)


def test_what_would_be_far_larger_when_decompressed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    file.write_bytes(bytes(1 << 20))
    check_expansion(file, 1 << 30)
    with pytest.raises(FormatError, match=r"x\.npz has 1 MiB.* expand to 2 GiB.* without compress"):
        check_expansion(file, 2 << 30)
    file.write_bytes(bytes(11 << 20))
    check_expansion(file, 2 << 30)


def test_a_table_of_tokens_is_not_read_whatever_its_size(tmp_path: Path) -> None:
    ids = np.zeros((8 << 20) + 1, "i8")
    np.savez(tmp_path / "x.npz", W=np.zeros((3, 4, 2), "f4"), dead_ids=ids)
    with pytest.raises(FormatError, match=r"has shape \(8388609,\), .* map={.ignore.: .dead_ids.}"):
        trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")


def test_very_many_tiny_rows_are_few_blocks(tmp_path: Path) -> None:
    W = np.random.default_rng(0).normal(size=(5_000, 32, 8)).astype("f4")
    np.savez(tmp_path / "x.npz", W=W)
    done = trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path)
    assert ds.attrs["block_rows"] == 2048
    assert (ds.W.values == W).all()
    assert trajstore.verify(done.path).clean
    given = trajstore.import_file(tmp_path / "x.npz", tmp_path / "other.zarr", block_rows=64)
    assert trajstore.open_run(given.path).attrs["block_rows"] == 64


KNOWN = truth()
W = KNOWN.values["W"]
FINE = (W * 1.2345).astype("f2")  # float16 that no bfloat16 holds
FINE[0] = 0


def test_bits_of_one_variable(tmp_path: Path) -> None:
    arrays = {"W": W.astype("f2"), "v": FINE, "m": np.zeros_like(FINE)}
    ds, done = imported(tmp_path, arrays)
    (note,) = [note for note in done.notes if "bits=" in note]
    assert note.startswith("W, exp_avg: float16")
    assert "; bits={'W': 'bfloat16', 'exp_avg': 'bfloat16'} stores" in note
    # Of all, it would make other numbers of the second moment.
    with pytest.raises(InvalidArgument, match=r"value of W is .* not every value of exp_avg_sq"):
        imported(tmp_path, arrays, bits="bfloat16")
    ds, done = imported(tmp_path, arrays, bits={"W": "bfloat16"})
    assert ds.W.attrs["native_dtype"] == "bfloat16"
    assert ds.exp_avg_sq.attrs["native_dtype"] == "float16"
    assert (ds.exp_avg_sq.values == FINE.astype("f4")).all()
    assert not any("exp_avg_sq" in note for note in done.notes)


def test_bits_in_one_array_and_numbers_in_another(tmp_path: Path) -> None:
    half = FINE.copy()
    arrays = {"W": stored(W, "uint16"), "m": half.view("u2"), "v": W, "g": stored(W, "float16")}
    arrays["g"][0] = 0
    ds, _ = imported(tmp_path, arrays, bits={"m": "float16", "grad": "float16", "*": "bfloat16"})
    types = {name: ds[name].attrs["native_dtype"] for name in ds.data_vars}
    assert types == {
        "W": "bfloat16", "grad": "float16", "exp_avg": "float16", "exp_avg_sq": "bfloat16"
    }  # fmt: skip
    assert (ds.exp_avg.values == half.astype("f4")).all()
    assert (ds.W.values == W).all()


def test_bits_of_other_types_are_refused(tmp_path: Path) -> None:
    for bits, message in (
        ({"W": "bfloat16"}, "bits={'W': '…'} applies to uint16 and float16, but W is float32"),
        ({"loss": "bfloat16"}, "bits={'loss': '…'} .* but the file holds no loss"),
        ({"W": "float8"}, "got bits 'float8'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            imported(tmp_path, {"W": W, "m": FINE}, bits=bits)
