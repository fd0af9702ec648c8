"""HDF5 files, valid and damaged; reading by rows."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from exchange_runs import assert_same_run

import trajstore
from trajstore.errors import FormatError, InvalidArgument
from trajstore.formats.hdf5 import Hdf5File

SmallRun = tuple[Path, dict[str, np.ndarray]]
ROWS, TOKENS, HIDDEN = 9, 5, 3


def foreign(path: Path, **changes: Any) -> Path:
    """A file as written by a loop with h5py; None omits a dataset."""
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) % 2 == 0
    W = rng.integers(0, 1 << 15, (ROWS, TOKENS, HIDDEN)).astype("u2")
    arrays = {"W": W, "trained_mask": ~mask, "untrained_mask": mask} | changes
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file.create_dataset(name, data=array)
    return path


def text(**texts: str) -> dict[str, np.ndarray]:
    """Texts as an export holds them."""
    return {key: np.frombuffer(value.encode(), "u1") for key, value in texts.items()}


OWN = {
    "trajstore_json": np.frombuffer(b"{}", "u1"),
    "recorded_steps": np.arange(ROWS),
    "token": np.arange(TOKENS, dtype="i4"),
}
"""What an export of a whole run adds."""


def test_an_export_of_an_older_version_is_a_whole_run(small_run: SmallRun, tmp_path: Path) -> None:
    trajstore.export(small_run[0], tmp_path / "f.h5", format="hdf5")
    with h5py.File(tmp_path / "f.h5", "a") as file:  # it had two masks and no numbers
        for key in ("dead_mask", "live_mask", "dead_ids", "live_ids"):
            del file[key]
        for key in list(file.attrs):
            del file.attrs[key]
    done = trajstore.import_file(tmp_path / "f.h5", tmp_path / "back.zarr")
    assert (done.layout, done.notes) == ("hdf5", ())
    assert_same_run(small_run[0], tmp_path / "back.zarr")


WRONG: dict[str, dict[str, Any]] = {
    "expected whole numbers": {"steps": np.bytes_("abc")},
    "cannot read its attributes": OWN | {"trajstore_json": np.array([123], "u1")},
    "trajstore_json is": OWN | {"trajstore_json": np.zeros(3)},
    "config is int, expected an obj": OWN | text(trajstore_json='{"config": 3}'),
    "token_text must hold 5 strings": OWN | text(token_text_json='["a"]'),
    "and no length of 0": OWN | {"W": np.zeros((0, TOKENS, HIDDEN), "u2")},
    "cannot read traj": OWN | {"trajstore_json": np.array([255], "u1")},
    "untrained_mask and trained_mask dis": OWN | {"trained_mask": np.ones(TOKENS, bool)},
    "dead_ids holds 5, expected pos": OWN | {"dead_ids": np.array([0, 2, TOKENS])},
    "layout hdf5 requires token": OWN | {"token": None},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_contents_are_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        trajstore.import_file(foreign(tmp_path / "f.h5", **WRONG[message]), tmp_path / "run.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["f.h5"]


def test_sizes_that_are_announced_and_not_stored_are_refused(tmp_path: Path) -> None:
    for chunks in (None, (1, 50_257, 64), (400, 50_257, 64)):
        with h5py.File(tmp_path / "f.h5", "w") as file:
            file.create_dataset("W", (1 << 20, 50_257, 64), "u2", chunks=chunks)
        assert (tmp_path / "f.h5").stat().st_size < 1 << 20
        with pytest.raises(FormatError, match="h5: W is incomplete: "):
            trajstore.import_file(tmp_path / "f.h5", tmp_path / "run.zarr")


def test_attributes_that_list_tokens_are_refused(tmp_path: Path) -> None:
    file = foreign(tmp_path / "f.h5", trained_mask=None, untrained_mask=None)
    with h5py.File(file, "a") as opened:
        opened.attrs["dead_ids"] = [1, 3]
    with pytest.raises(FormatError, match="dead_ids is an attribute, but dead_ids is"):
        trajstore.import_file(file, tmp_path / "run.zarr")
    np.save(tmp_path / "dead_ids.npy", [1, 3])
    given: dict[str, Any] = {"masks": tmp_path / "dead_ids.npy", "map": {"ignore": "dead_ids"}}
    done = trajstore.import_file(file, tmp_path / "run.zarr", **given)
    assert np.flatnonzero(trajstore.open_run(done.path).is_dead.values).tolist() == [1, 3]


def test_links_are_named_and_never_followed(tmp_path: Path) -> None:
    path = foreign(tmp_path / "f.h5")
    with h5py.File(path, "a") as file:
        file["again"] = h5py.SoftLink("/W")
        file["data/grads"] = h5py.ExternalLink("no such file.h5", "/g")
        file.create_dataset("words", data=["a", "b"])
        file.attrs["description"] = "a text of any length"
    done = trajstore.import_file(path, tmp_path / "run.zarr")
    left = {line.name: line.why for line in done.table if not line.kind}
    assert left["again"] == "a link to /W, not followed"
    assert left["data/grads"] == "a link to /g of no such file.h5, not followed"
    assert "variable-length" in left["words"]
    assert "variable-length" in left["description"]
    assert any("data/grads" in note for note in done.notes if note.startswith("omitted"))


def test_arrays_in_groups_go_by_their_last_names(tmp_path: Path) -> None:
    W = np.arange(ROWS * TOKENS * HIDDEN, dtype="f4").reshape(ROWS, TOKENS, HIDDEN)
    dead = np.arange(TOKENS) % 2 == 0
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["states/W"], file["masks/dead_mask"], file["pca/first"] = W, dead, W + 1
    done = trajstore.import_file(tmp_path / "f.h5", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path)
    assert (ds.W.values == W).all()
    assert (ds.is_dead.values == dead).all()
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["states"].attrs["n_runs"] = 1
        file.attrs["layout"] = [1, 2]  # not the name of one
        file.create_group("config").attrs["lr"] = 0.25
    done = trajstore.import_file(tmp_path / "f.h5", tmp_path / "run.zarr", overwrite=True)
    attrs = trajstore.open_run(done.path).attrs
    assert attrs["optimizer"]["hyperparameters"] == {"initial_lr": 0.25}
    assert attrs["config"]["scalars"] == {"states/n_runs": 1}
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["other/W"] = W
    with pytest.raises(FormatError, match="both have names of W"):
        trajstore.import_file(tmp_path / "f.h5", tmp_path / "run.zarr", overwrite=True)


def test_references_compounds_and_values_elsewhere_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["grad"] = np.zeros((2, 3, 4), "f4")
        file.create_dataset("W", (2, 3, 4), h5py.ref_dtype)[0, 0, 0] = file["grad"].ref
        file.create_dataset("U", (2, 3), np.dtype([("a", "f4"), ("b", "f4")]))
    with pytest.raises(
        FormatError, match=r"(?s)U  not read: of a compound.* W  not read: references"
    ):
        trajstore.import_file(tmp_path / "f.h5", tmp_path / "run.zarr")
    layout = h5py.VirtualLayout((2, 3, 4), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "W", (2, 3, 4))
    (tmp_path / "secret").write_bytes(bytes(96))
    for number in range(2):
        with h5py.File(tmp_path / "v.h5", "w") as file:
            if number:
                file.create_virtual_dataset("W", layout)
            else:
                file.create_dataset("W", (2, 3, 4), "f4", external=[(tmp_path / "secret", 0, 96)])
        with pytest.raises(FormatError, match="W stores its values in other files"):
            trajstore.import_file(tmp_path / "v.h5", tmp_path / "run.zarr")
    with h5py.File(tmp_path / "l.h5", "w") as file:
        file["W"] = np.zeros((2, 3, 4), np.longdouble)
    with pytest.raises(FormatError, match="W has type "):
        trajstore.import_file(tmp_path / "l.h5", tmp_path / "run.zarr")


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than 100 bytes are treated as large ones."""
    monkeypatch.setattr("trajstore.formats.hdf5._LARGE_CHUNK", 100)


def values() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 9, (23, 10, 4)).astype("u2")


def chunked(path: Path, data: np.ndarray, chunks: Any, **options: Any) -> Path:
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("W", data=data, chunks=chunks, **options)
    return path


@pytest.mark.parametrize("chunks", [(7, 10, 4), (30, 12, 4), (5, 4, 3)])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "shuffle": True}])
def test_rows_in_any_order(tmp_path: Path, chunks: Any, options: dict[str, Any]) -> None:
    options = options | {"maxshape": (None, None, None)}
    with Hdf5File(chunked(tmp_path / "f.h5", values(), chunks, **options)) as file:
        for start, stop in ((0, 23), (0, 1), (3, 9), (9, 11), (8, 22), (2, 3), (22, 23)):
            assert (file.read("W", start, stop) == values()[start:stop]).all()
        assert (file.read("W") == values()).all()


@pytest.mark.parametrize("chunks", [(1, 7, 10, 4), (2, 23, 10, 4)])
def test_rows_of_one_of_several_runs(tmp_path: Path, chunks: Any) -> None:
    several = np.stack([values(), values() + 1, values() + 2])
    with Hdf5File(chunked(tmp_path / "f.h5", several, chunks, compression="gzip")) as file:
        for outer in (0, 1, 2, 0):
            assert (file.read("W", 5, 16, outer) == several[outer, 5:16]).all()


def test_a_chunk_larger_than_the_memory_is_an_error(tmp_path: Path) -> None:
    path = chunked(tmp_path / "f.h5", values(), (20, 10, 4), compression="lzf")
    with (
        pytest.raises(InvalidArgument, match=r"20 rows, .* 4\.688 KiB.*h5repack"),
        Hdf5File(path, memory=1000) as file,
    ):
        file.read("W", 0, 1)


def test_a_chunk_is_decompressed_once(tmp_path: Path) -> None:
    whole = np.arange(6, dtype="u4").repeat(3 << 18).reshape(6, 3, 1 << 18)  # beyond HDF5's cache
    path = chunked(tmp_path / "f.h5", whole, (3, 3, 1 << 17), compression="gzip")
    with Hdf5File(path) as file, path.open("r+b") as raw:
        assert (file.read("W", 2, 4) == whole[2:4]).all()
        raw.truncate(raw.seek(0, 2) // 2)
        assert (file.read("W", 4, 6) == whole[4:6]).all()
        with pytest.raises(FormatError, match="cannot read W"):
            file.read("W", 0, 6)


def test_a_chunk_that_ends_too_early(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        dataset = file.create_dataset("W", values().shape, "u2", chunks=(23, 10, 4),
                                      compression="gzip")  # fmt: skip
        dataset.id.write_direct_chunk((0, 0, 0), zlib.compress(values().tobytes())[:-9])
    with Hdf5File(tmp_path / "f.h5") as file, pytest.raises(FormatError, match="cannot read W"):
        file.read("W", 0, 2)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_an_uncompressed_chunk(tmp_path: Path) -> None:
    shape = (96, 1024, 512)  # 96 MiB in one chunk
    path = chunked(tmp_path / "f.h5", np.ones(shape, "u2"), shape)
    code = """
import sys
from pathlib import Path
from trajstore.formats.hdf5 import Hdf5File
with Hdf5File(sys.argv[1]) as file:
    for row in range(0, 96, 4):
        assert (file.read("W", row, row + 4) == 1).all()
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 110 << 10  # KiB; the interpreter and its libraries take half of it
