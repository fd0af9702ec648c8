from __future__ import annotations

import itertools
import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trajstore.errors import FormatError, RunNotFound
from trajstore.formats.array_file import NpyFile, NpzFile
from trajstore.formats.safetensors import SafetensorsFile, Tensor, write_safetensors


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


def raw(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


UNSOUND = {
    "no JSON": b"{nonsense",
    "not UTF-8": b'{"\xff": 1}',
    "a name twice": b'{"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
    b'"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}',
    "deep": b"[" * 100_000,
    "many dimensions": {"a": entry("I64", [1] * 9, 0, 8)},
    "huge and empty": {"a": entry("I64", [0, 1 << 62], 0, 0), "b": entry("I64", [1], 0, 8)},
    "past the end": {"a": entry("I64", [2], 0, 16)},
    "overlap": {"a": entry("I64", [1], 0, 8), "b": entry("I32", [1], 4, 8)},
}


def test_invalid_headers_and_other_files_are_refused(tmp_path: Path) -> None:
    sound = [raw(tmp_path / "a", header, bytes(8)).read_bytes() for header in UNSOUND.values()]
    for content in (*sound, b"", bytes(8), b"\xff" * 64):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(FormatError, match="is not a valid safetensors file"):
            SafetensorsFile(tmp_path / "a")


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write((5 << 30).to_bytes(8, "little"))
        file.truncate(6 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="at most"):
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": np.arange(1000)}, tmp_path / "a")
    with SafetensorsFile(tmp_path / "a") as file:
        with (tmp_path / "a").open("r+b") as other:
            other.truncate(500)
        with pytest.raises(FormatError, match="cut short"):
            file.read("a")


def test_values_are_written_in_any_parts(tmp_path: Path) -> None:
    bits = np.arange(4 * 5 * 3, dtype=np.uint16).reshape(4, 5, 3)
    halves = ((slice(2, 4), slice(0, 2)), (slice(0, 2), slice(2, 5)))
    path = tmp_path / "a"
    path.touch()
    W = Tensor(
        key="W",
        dtype="bfloat16",
        shape=bits.shape,
        read=lambda where: (bits[where], 1),
        parts=lambda: itertools.product(*halves),
    )
    progress: list[tuple[int, int]] = []
    rounded = write_safetensors(path, [W], {"a": "b"}, lambda *done: progress.append(done))
    assert load_file(path)["W"].tobytes() == bits.tobytes()
    assert rounded == {"W": 4}
    assert progress[-1] == (bits.nbytes,) * 2
