from __future__ import annotations

import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trajstore.errors import FormatError, RunNotFound
from trajstore.formats.array_file import NpyFile, NpzFile


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "W": rng.normal(size=(5, 4, 3)).astype("f4"),
        "fortran": np.asfortranarray(rng.normal(size=(5, 4, 3))),
        "big_endian": rng.normal(size=(5, 2)).astype(">f2"),
        "bf16": rng.normal(size=(5, 2)).astype(ml_dtypes.bfloat16),
        "bf16_fortran": np.asfortranarray(rng.normal(size=(5, 2))).astype(ml_dtypes.bfloat16),
        "steps": np.arange(5),
        "scalar": np.float32(1e-3),
    }


@pytest.mark.parametrize("compressed", [True, False])
def test_rows_of_every_member(tmp_path: Path, compressed: bool) -> None:
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "f.npz", **arrays())
    with NpzFile(tmp_path / "f.npz") as file:
        assert set(file.keys) == arrays().keys()
        assert file.dtype("bf16") == "uint16"
        for key, array in arrays().items():
            whole = np.asarray(array).astype(array.dtype.newbyteorder("="))
            assert file.read(key).tobytes() == np.ascontiguousarray(whole).tobytes()
            if array.ndim:
                for start in (3, 0):  # also back
                    part = np.ascontiguousarray(whole[start : start + 2])
                    assert file.read(key, start, start + 2).tobytes() == part.tobytes()
        for key in ("W", "fortran"):
            inner = np.ascontiguousarray(arrays()[key][4, 1:3])
            assert file.read(key, 1, 3, 4).tobytes() == inner.tobytes()


def test_one_array_has_the_name_of_its_file(tmp_path: Path) -> None:
    for W in (arrays()["W"], np.asfortranarray(arrays()["W"])):
        np.save(tmp_path / "W_history.npy", W)
        with NpyFile(tmp_path / "W_history.npy") as file:
            assert file.keys == ("W_history",)
            assert file.shape("W_history") == (5, 4, 3)
            assert (file.read("W_history", 2, 4).view("f4") == W[2:4]).all()


def test_pickles_are_never_read(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}], dtype=object)
    np.save(tmp_path / "f.npy", objects, allow_pickle=True)
    with pytest.raises(FormatError, match="Python objects"):
        NpyFile(tmp_path / "f.npy")
    np.savez(tmp_path / "f.npz", a=objects, b=np.arange(3))
    with NpzFile(tmp_path / "f.npz") as file:
        assert file.keys == ("b",)
        assert "Python objects" in file.unread["a"]


def test_sizes_that_are_announced_and_not_there(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros((10, 3)))
    whole = (tmp_path / "f.npy").read_bytes()
    for data in (whole[:-8], whole + b"x", whole.replace(b"(10, 3)", b"(90, 3)"), whole[:40]):
        (tmp_path / "f.npy").write_bytes(data)
        with pytest.raises(FormatError, match=r"not a valid \.npy"):
            NpyFile(tmp_path / "f.npy")
    with zipfile.ZipFile(tmp_path / "f.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("W.npy", whole.replace(b"(10, 3)", b"(90, 3)"))
    with pytest.raises(FormatError, match=r"W\.npy: it needs 2160 bytes"):
        NpzFile(tmp_path / "f.npz")
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as file:
        file.writestr("readme.txt", "no array")
    with pytest.raises(FormatError, match="not a NumPy array"):
        NpzFile(tmp_path / "f.npz")
    with pytest.raises(RunNotFound):
        NpzFile(tmp_path / "none.npz")


def test_a_damaged_member_is_found_when_it_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "f.npz", W=np.random.default_rng(0).normal(size=(50, 900)))
    data = bytearray((tmp_path / "f.npz").read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / "f.npz").write_bytes(data)
    with (
        pytest.raises(FormatError, match="cannot read W"),
        NpzFile(tmp_path / "f.npz") as file,
    ):
        file.read("W")
