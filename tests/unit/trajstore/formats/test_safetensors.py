from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trajstore.errors import FormatError
from trajstore.formats.safetensors import SafetensorsFile, Tensor, constant, write_safetensors


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
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


@pytest.mark.parametrize("header", UNSOUND.values(), ids=UNSOUND.keys())
def test_invalid_headers_are_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(FormatError, match="is not a valid safetensors file"):
        SafetensorsFile(raw(tmp_path / "a", header, bytes(8)))


@pytest.mark.parametrize("content", [b"", bytes(8), b"\xff" * 64])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
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


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    bits = np.arange(4 * 5 * 3, dtype=np.uint16).reshape(4, 5, 3)

    def parts() -> Any:
        return itertools.product((slice(2, 4), slice(0, 2)), (slice(0, 2), slice(2, 5)))

    def read(where: Any) -> Any:
        return bits[where], 1

    path = tmp_path / "a"
    path.touch()
    progress: list[tuple[int, int]] = []
    rounded = write_safetensors(
        path,
        [
            Tensor(key="W", dtype="bfloat16", shape=bits.shape, parts=parts, read=read),
            constant("steps", "int64", [3, 4]),
            constant("one", "float32", 0.5),
            constant("mask", "bool", [True, False, True]),
        ],
        {"a": "b"},
        lambda done, total: progress.append((done, total)),
    )
    loaded = load_file(path)
    assert loaded["W"].dtype == ml_dtypes.bfloat16
    assert loaded["W"].tobytes() == bits.tobytes()
    assert loaded["steps"].tolist() == [3, 4]
    assert loaded["one"].shape == ()
    assert loaded["mask"].tolist() == [True, False, True]
    assert rounded == {"W": 4, "steps": 0, "one": 0, "mask": 0}
    assert progress[-1] == (bits.nbytes + 16 + 4 + 3,) * 2
