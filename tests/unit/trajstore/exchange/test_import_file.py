"""Imports: options, targets, limits, and types of the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_runs import imported, stored, truth, write
from safetensors.numpy import save_file

import trajstore
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunNotFound
from trajstore.exchange.file_rows import check_size
from trajstore.formats.array_file import check_expansion

KNOWN = truth()
W = KNOWN.values["W"]
FINE = (W * 1.2345).astype("f2")  # float16 that no bfloat16 holds
FINE[0] = 0


def recorder_file(path: Path, **changes: Any) -> Path:
    """A file of the recorder of 15.1a, with changes; None omits a key."""
    names = {"embeddings": "W", "grads": "grad", "momentum": "exp_avg", "variance": "exp_avg_sq"}
    arrays = {key: stored(KNOWN.values[name], "float32") for key, name in names.items()}
    arrays |= {
        "recorded_steps": KNOWN.steps,
        "dead_token_ids": np.flatnonzero(KNOWN.dead),
        "live_token_ids": np.flatnonzero(~KNOWN.dead),
        "logits": stored(KNOWN.values["logits"], "float32"),
        "losses": KNOWN.values["loss"] * 1.2345,
        "learning_rate": np.array(1e-3, "f4"),
        "adam_beta1": np.array(0.9, "f4"),
        "adam_beta2": np.array(0.999, "f4"),
        "init_sigma": np.array(1e-5, "f4"),
        "init_method_code": np.array(0, "i4"),
    } | changes
    given = {key: array for key, array in arrays.items() if array is not None}
    return write(path, "safetensors", given)


def test_an_import_adds_no_values(tmp_path: Path) -> None:
    recorder_file(tmp_path / "f", momentum=None, learning_rate=None)
    done = trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr")
    ds = trajstore.open_run(tmp_path / "run.zarr")
    assert set(ds.data_vars) == {"W", "grad", "exp_avg_sq", "logits", "loss"}
    assert set(ds.coords) == {"step", "token", "is_dead"}
    assert ds.is_dead.values.tolist() == KNOWN.dead.tolist()
    assert ds.attrs["optimizer"] == {"hyperparameters": {"betas": [0.9, 0.999]}}
    assert ds.attrs["config"] == {"initialization": {"sigma": 1e-5, "dtype": "float32"}}
    assert any("does not hold momentum" in note for note in done.notes)
    assert ds.attrs["imported"]["notes"] == list(done.notes)
    for name in ("grad", "logits", "loss"):
        assert np.isnan(ds[name].values[0]).all()
    assert (done.variables["grad"], done.variables["loss"]) == ("bfloat16", "float32")


def test_float32_is_bfloat16_only_where_every_value_is(tmp_path: Path) -> None:
    ones = np.ones((6, 7, 3), "f4")
    ones[-1, -1, -1] = np.nextafter(np.float32(1), np.float32(2))
    ds, done = imported(tmp_path, {"W": ones})
    assert done.variables == {"W": "float32"}
    assert (ds.W.values == ones).all()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("14.1a", r"layout 14\.1a requires deltas"),
        ("native", "layout native requires step, token"),
        ("hdf5", "layout hdf5 is for hdf5 files"),
        ("15", "no layout '15'"),
    ],
)
def test_a_forced_layout_names_the_missing_keys(tmp_path: Path, layout: str, message: str) -> None:
    recorder_file(tmp_path / "f")
    with pytest.raises((FormatError, InvalidArgument), match=message):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", layout=layout)


def test_options_are_refused_for_a_native_file(tmp_path: Path) -> None:
    arrays = {"step": np.arange(2), "token": np.arange(3), "W": np.zeros((2, 3, 1), "f4")}
    save_file(arrays, tmp_path / "f", metadata={"format": "trajstore"})
    save_file({"dead_ids": np.array([1])}, tmp_path / "masks")
    options: dict[str, Any] = {"map": {"ignore": "W"}, "bits": "bfloat16", "first_row": 0}
    options |= {"labels": {"steps": "0:12"}, "masks": tmp_path / "masks"}
    named = "map, bits, labels, masks, first_row"
    with pytest.raises(InvalidArgument, match=f"layout native.* {named} would have no effect"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", **options)
    assert not (tmp_path / "run.zarr").exists()
    trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr")


def test_targets_and_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no file"):
        trajstore.import_file(tmp_path / "none", tmp_path / "run.zarr")
    file = recorder_file(tmp_path / "f")
    trajstore.import_file(file, tmp_path / "run.zarr")
    with pytest.raises(RunExists, match="already exists"):
        trajstore.import_file(file, tmp_path / "run.zarr")
    recorder_file(file, losses=None)
    trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    # A failure leaves what was there as it was.
    recorder_file(file)
    for name in ("run.zarr", "new.zarr"):
        with pytest.raises(KeyboardInterrupt):
            trajstore.import_file(file, tmp_path / name, overwrite=True, on_progress=interrupt)
    recorder_file(file, embeddings=None)
    with pytest.raises(FormatError):
        trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "run.zarr"]


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
    ids = np.zeros((8 << 20) + 1, "u1")
    np.savez(tmp_path / "x.npz", W=np.zeros((3, 4, 2), "f4"), dead_ids=ids)
    with pytest.raises(FormatError, match=r"has shape \(8388609,\)"):
        trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")


def test_very_many_tiny_rows_are_few_blocks(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5_000, 32, 8)).astype("f4")
    np.savez(tmp_path / "x.npz", W=rows)
    done = trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path)
    assert ds.attrs["block_rows"] == 2048
    assert (ds.W.values == rows).all()
    assert trajstore.verify(done.path).clean
    given = trajstore.import_file(tmp_path / "x.npz", tmp_path / "other.zarr", block_rows=64)
    assert trajstore.open_run(given.path).attrs["block_rows"] == 64


def test_a_note_says_which_variables_could_be_bits(tmp_path: Path) -> None:
    _, done = imported(tmp_path, {"W": W.astype("f2"), "v": FINE, "m": np.zeros_like(FINE)})
    (note,) = [note for note in done.notes if "bits=" in note]
    assert note.startswith("W, exp_avg: float16")
    assert "; bits={'W': 'bfloat16', 'exp_avg': 'bfloat16'} stores" in note
    _, done = imported(tmp_path, {"W": W.astype("f2")})
    assert any("; bits='bfloat16' stores" in note for note in done.notes)
    ds, done = imported(tmp_path, {"W": W.astype("f2")}, bits="bfloat16")
    assert done.variables == {"W": "bfloat16"}
    assert any(note.startswith("W: float16 in the file, bfloat16 in") for note in done.notes)
    assert ds.W.values.tobytes() == W.astype("f2").astype("f4").tobytes()


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


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ({"W": "bfloat16"}, "bits={'W': '…'} applies to uint16 and float16, but W is float32"),
        ({"loss": "bfloat16"}, "bits={'loss': '…'} .* but the file holds no loss"),
        ({"W": "float8"}, "got bits 'float8'"),
        # Of all, it would make other numbers of the second moment.
        ("bfloat16", "value of exp_avg is .* not every value of exp_avg_sq"),
    ],
)
def test_bits_of_other_types_are_refused(tmp_path: Path, bits: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        imported(tmp_path, {"W": W, "m": W.astype("f2"), "v": FINE}, bits=bits)
