from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.errors import FormatError, InvalidArgument
from trajstore.formats.hdf5 import Hdf5File

h5py = pytest.importorskip("h5py")


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than 100 bytes are treated as large ones."""
    monkeypatch.setattr("trajstore.formats.hdf5._LARGE_CHUNK", 100)


def values() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 9, (23, 10, 4)).astype("u2")


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("chunks", [(7, 10, 4), (30, 12, 4), (5, 4, 3)])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}])
def test_rows_in_any_order(tmp_path: Path, chunks: Any, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "f.h5", "w", userblock_size=512) as file:
        file.create_dataset(
            "W", data=values(), chunks=chunks, maxshape=(None, None, None), **options
        )
    with Hdf5File(tmp_path / "f.h5") as file:
        for start, stop in ((0, 23), (0, 1), (3, 9), (9, 11), (8, 22), (2, 3), (22, 23)):
            assert (file.read("W", start, stop) == values()[start:stop]).all()
        assert (file.read("W") == values()).all()


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("chunks", [(1, 7, 10, 4), (2, 23, 10, 4)])
def test_rows_of_one_of_several_runs(tmp_path: Path, chunks: Any) -> None:
    several = np.stack([values(), values() + 1, values() + 2])
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("W", data=several, chunks=chunks, compression="gzip")
    with Hdf5File(tmp_path / "f.h5") as file:
        for outer in (0, 1, 2, 0):
            assert (file.read("W", 5, 16, outer) == several[outer, 5:16]).all()


@pytest.mark.usefixtures("small_is_large")
def test_a_chunk_larger_than_the_memory_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("W", data=values(), chunks=(20, 10, 4), compression="lzf")
    with (
        pytest.raises(InvalidArgument, match=r"20 rows, .* 4\.688 KiB.*h5repack"),
        Hdf5File(tmp_path / "f.h5", memory=1000) as file,
    ):
        file.read("W", 0, 1)


def test_a_chunk_is_decompressed_once(tmp_path: Path) -> None:
    whole = np.arange(6, dtype="u4").repeat(3 << 20).reshape(6, 3, 1 << 20)  # 72 MiB
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("W", data=whole, chunks=(3, 3, 1 << 19), compression="gzip")
    with Hdf5File(tmp_path / "f.h5") as file, (tmp_path / "f.h5").open("r+b") as raw:
        assert (file.read("W", 2, 4) == whole[2:4]).all()
        raw.truncate(raw.seek(0, 2) // 2)
        assert (file.read("W", 4, 6) == whole[4:6]).all()
        with pytest.raises(FormatError, match="cannot read W"):
            file.read("W", 0, 6)


@pytest.mark.usefixtures("small_is_large")
def test_a_chunk_that_ends_too_early(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        dataset = file.create_dataset("W", values().shape, "u2", chunks=(23, 10, 4),
                                      compression="gzip")  # fmt: skip
        dataset.id.write_direct_chunk((0, 0, 0), zlib.compress(values().tobytes())[:-9])
    with Hdf5File(tmp_path / "f.h5") as file, pytest.raises(FormatError, match="cannot read W"):
        file.read("W", 0, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_an_uncompressed_chunk(tmp_path: Path) -> None:
    shape = (96, 1024, 512)  # 96 MiB in one chunk
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("W", data=np.ones(shape, "u2"), chunks=shape)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trajstore.formats.hdf5 import Hdf5File\n"
        "with Hdf5File(sys.argv[1]) as file:\n"
        "    for row in range(0, 96, 4):\n"
        "        assert (file.read('W', row, row + 4) == 1).all()\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(status.partition('VmHWM:')[2].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "f.h5")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 110 << 10  # KiB; the interpreter and its libraries take half of it
