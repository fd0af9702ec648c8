"""Malicious stores and files, each made by one function in a folder."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked_trials
import numpy as np

Making = Callable[[Path], None]

ROOT = "zarr.json"
ESCAPES = ["\x1b[31mred", "[bold]rich[/bold]", "\u202eturned", "\ud800", "\x07bell", "a\nb"]
W = np.zeros((10, 6, 4), "f4")


def _run(folder: Path, change: Callable[[Path], None] = lambda run: None) -> None:
    forked_trials.create(str(folder / "run.zarr"))
    change(folder / "run.zarr")


def _edited(run: Path, change: Callable[[dict[str, Any]], None], *names: str) -> None:
    """Change the metadata files of arrays and their copies in the root."""
    root = json.loads((run / ROOT).read_text())
    for name in names:
        change(root["consolidated_metadata"]["metadata"][name])
        own = json.loads((run / name / ROOT).read_text())
        change(own)
        (run / name / ROOT).write_text(json.dumps(own))
    if not names:
        change(root)
    (run / ROOT).write_text(json.dumps(root))


def _long(metadata: dict[str, Any], axis: int) -> None:
    metadata["shape"][axis] = 1 << 44


def _coarse(metadata: dict[str, Any]) -> None:
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 30, 1 << 20, 1 << 10]
    for codec in metadata["codecs"]:
        if "chunk_shape" in codec.get("configuration", {}):
            codec["configuration"]["chunk_shape"] = [1 << 30, 1 << 20, 1 << 10]


def _named(root: dict[str, Any]) -> None:
    entries = root["consolidated_metadata"]["metadata"]
    for name in ("../../outside", "/etc/passwd", "W/../../outside"):
        entries[name] = entries["W"]


def _replaced(run: Path, text: str) -> None:
    (run / ROOT).write_text(text)


def _blanks(run: Path) -> None:
    with (run / ROOT).open("a") as file:
        for _ in range(300):
            file.write(" " * (1 << 20))


def _broken_index(run: Path) -> None:
    shard = run / "W" / "c.0.0.0"
    data = bytearray(shard.read_bytes())
    data[-20:-4] = struct.pack("<QQ", 1 << 62, 1 << 62)
    shard.write_bytes(data)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _linked(run: Path) -> None:
    """Move an array elsewhere, next to files that belong to others."""
    elsewhere = run.parent / "elsewhere"
    (run / "W").rename(elsewhere)
    (run / "W").symlink_to(elsewhere)
    (elsewhere / "c.9.0.0").write_text("another owner's")
    (elsewhere / ".mine.1.partial").write_text("another owner's")


def _escapes(folder: Path) -> None:
    from trajstore import RunWriter

    texts = [text for text in ESCAPES if text.isprintable() or text[0] != "\ud800"]
    with RunWriter.create(
        folder / "run.zarr", token=np.arange(6), hidden=4, variables={"W": "float32"},
        token_text=(texts + ["x"] * 6)[:6], is_dead=np.arange(6) < 2,
        config={"[red]name[/red]": "\x1b[2J\u202eend", "x": ESCAPES[1]}, commit_every=None,
    ) as run:  # fmt: skip
        for step in range(3):
            run.append(step, W=W[0] + step)


STORES: dict[str, Making] = {
    "shape of 2^44 tokens": partial(
        _run, change=lambda run: _edited(run, partial(_long, axis=1), "W")
    ),
    "shape of 2^44 rows": partial(
        _run, change=lambda run: _edited(run, partial(_long, axis=0), "W", "grad", "loss", "step")
    ),
    "chunks of 2^60 values": partial(_run, change=lambda run: _edited(run, _coarse, "W")),
    "index beyond the shard": partial(_run, change=_broken_index),
    "nested 100,000 deep": partial(
        _run, change=partial(_replaced, text='{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    ),
    "300 MB of blanks": partial(_run, change=_blanks),
    "integer of 100,000 digits": partial(
        _run, change=partial(_replaced, text='{"zarr_format":' + "9" * 100_000 + "}")
    ),
    "arrays ../x and /x": partial(_run, change=lambda run: _edited(run, _named)),
    "a pipe as a metadata file": partial(_run, change=lambda run: _pipe(run / ROOT)),
    "a pipe as a shard": partial(_run, change=lambda run: _pipe(run / "W" / "c.1.0.0")),
    "an array that is a link": partial(_run, change=_linked),
    "texts with escapes": _escapes,
}


def _hdf5(folder: Path, write: Callable[[Any], None]) -> None:
    import h5py

    with h5py.File(folder / "x", "w") as file:
        write(file)


def _bomb(file: Any, shape: tuple[int, ...], name: str = "W", **options: Any) -> None:
    """Write a dataset of one chunk of zeros, compressed by deflate."""
    dataset = file.create_dataset(name, shape, "u2", chunks=shape, compression="gzip", **options)
    packed = zlib.compressobj(9)
    size = 2 * int(np.prod(shape))
    data = b"".join(packed.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packed.flush()
    dataset.id.write_direct_chunk((0,) * len(shape), data)


def _shuffled(file: Any, shape: tuple[int, ...]) -> None:
    _bomb(file, shape, shuffle=True)


def _table_bomb(file: Any) -> None:
    file["W"] = W
    _bomb(file, (1 << 28,), "dead_ids")


def _elsewhere(file: Any) -> None:
    import h5py

    file["W"] = h5py.ExternalLink("/etc/passwd", "/W")
    file["W_U"] = h5py.SoftLink("/W")


def _virtual(file: Any) -> None:
    import h5py

    layout = h5py.VirtualLayout((10, 6, 4), "f4")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "W", (10, 6, 4))
    file.create_virtual_dataset("W", layout)


def _external(file: Any) -> None:
    file.create_dataset("W", (10, 6, 4), "f4", external=[("/etc/passwd", 0, 960)])


def _references(file: Any) -> None:
    import h5py

    file["grad"] = W
    dataset = file.create_dataset("W", (10, 6, 4), h5py.ref_dtype)
    dataset[0, 0, 0] = file["grad"].ref


def _compound(file: Any) -> None:
    file.create_dataset("W", (10, 6, 4), np.dtype([("a", "f4"), ("b", "f4")]))


def _longdouble(file: Any) -> None:
    file["W"] = W.astype(np.longdouble)


def _unwritten(file: Any) -> None:
    file.create_dataset("W", (1 << 20, 50_257, 64), "u2", chunks=(1, 50_257, 64))


def _circle(file: Any) -> None:
    group = file.create_group("again")
    for name in "abcdefgh":
        group[name] = file["/"]


def _npz_bomb(folder: Path, shape: tuple[int, ...], name: str) -> None:
    with zipfile.ZipFile(folder / "x", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("W.npy", "w") as member:
            np.lib.format.write_array(member, W)
        with file.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = {"descr": "<u2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for _ in range(2 * int(np.prod(shape)) >> 20):
                member.write(bytes(1 << 20))


def _npz_names(folder: Path) -> None:
    with zipfile.ZipFile(folder / "x", "w") as file:
        # Outside the folder, by a relative and by an absolute path; neither may be written to.
        for name in ("../../outside.npy", "/outside.npy", "W.npy"):
            with file.open(name, "w") as member:
                np.lib.format.write_array(member, W)


def _pickled(folder: Path) -> None:
    with (folder / "x").open("wb") as file:
        np.save(file, np.array([print], object), allow_pickle=True)


def _safetensors(folder: Path, header: bytes, size: int | None = None) -> None:
    with (folder / "x").open("wb") as file:
        file.write(struct.pack("<Q", len(header) if size is None else size) + header)


def _announced(shape: list[int]) -> bytes:
    tensor = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 1 << 60]}
    return json.dumps({"W": tensor}).encode()


FILES: dict[str, Making] = {
    "HDF5, one chunk of 512 MiB": partial(_hdf5, write=partial(_bomb, shape=(2048, 2048, 64))),
    "HDF5, one chunk of tiny rows": partial(_hdf5, write=partial(_bomb, shape=(1 << 22, 64, 1))),
    "HDF5, a row of 256 MiB": partial(_hdf5, write=partial(_bomb, shape=(2, 1 << 21, 64))),
    "HDF5, 4 GiB in one chunk": partial(_hdf5, write=partial(_bomb, shape=(1 << 15, 1 << 10, 63))),
    "HDF5, 2^27 rows": partial(_hdf5, write=partial(_bomb, shape=(1 << 27, 2, 1))),
    "HDF5, 2^25 tokens": partial(_hdf5, write=partial(_bomb, shape=(8, 1 << 25, 1))),
    "HDF5, shuffled chunk of 320 MiB": partial(
        _hdf5, write=partial(_shuffled, shape=(80, 1 << 14, 128))
    ),
    "HDF5, shuffled chunk of 100 MiB": partial(
        _hdf5, write=partial(_shuffled, shape=(25, 1 << 14, 128))
    ),
    "HDF5, list of 2^28 ids": partial(_hdf5, write=_table_bomb),
    "HDF5, links": partial(_hdf5, write=_elsewhere),
    "HDF5, virtual": partial(_hdf5, write=_virtual),
    "HDF5, values in /etc/passwd": partial(_hdf5, write=_external),
    "HDF5, references": partial(_hdf5, write=_references),
    "HDF5, compound": partial(_hdf5, write=_compound),
    "HDF5, longdouble": partial(_hdf5, write=_longdouble),
    "HDF5, announced only": partial(_hdf5, write=_unwritten),
    "HDF5, groups in a circle": partial(_hdf5, write=_circle),
    "npz, 2^29 losses": partial(_npz_bomb, shape=(1 << 29,), name="losses"),
    "npz, 2^28 ids": partial(_npz_bomb, shape=(1 << 28,), name="dead_ids"),
    "npz, names ../x and /x": _npz_names,
    "npy, pickled": _pickled,
    "safetensors, header of 2^60": partial(_safetensors, header=b"{}", size=1 << 60),
    "safetensors, 2^59 values": partial(_safetensors, header=_announced([1 << 40, 1 << 19, 1])),
    "safetensors, 300 MB of blanks": lambda folder: _safetensors(folder, b" " * (300 << 20)),
    "safetensors, nested deep": partial(
        _safetensors, header=b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
    "safetensors, long integer": partial(
        _safetensors, header=b'{"a":' + b"9" * 100_000 + b"}"
    ),
}  # fmt: skip
