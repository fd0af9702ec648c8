""""""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import struct
from functools import reduce
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import xarray as xr
import zarr
from damage import put
from numcodecs import blosc
from object_stores import copied, web_server
from one_block import divided_run
from zarr.storage import ZipStore

from trajstore import RunWriter, analysis, export, open_run, verify
from trajstore.codec.block import ANYWHERE
from trajstore.codec.block_codec import BlockCodec
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    ObjectStoreError,
    RunNotFound,
    VariableNotRecorded,
)
from trajstore.schema import FORMAT
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.open_run import TrajstoreBackend
from trajstore.store.reading.run_info import information
from trajstore.store.writing.create import annotate_run


def test_open_run_is_what_plain_xarray_opens(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    plain = xr.open_zarr(path)
    ours = open_run(path)
    xr.testing.assert_identical(plain, ours)
    for name in ("W", "grad", "logits", "loss"):
        assert plain[name].chunks is not None  # lazy
        assert ours[name].chunksizes["step"] == (4, 4, 3)


def test_without_dask_a_selection_is_read_when_it_is_asked_for(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    plain, ours = xr.open_zarr(path).load(), open_run(path, chunks=None)
    assert ours.W.chunks is None
    xr.testing.assert_identical(plain, ours.copy().load())
    for where in (
        {"token": 3},
        {"step": [9, 2, 2], "token": slice(None, None, -2)},
        {"step": xr.DataArray([1, 5], dims="at"), "token": xr.DataArray([2, 7], dims="at")},
        {"step": slice(4, 4)},
        {"token": np.array([3, 0, 3])},
    ):
        xr.testing.assert_identical(plain.isel(where), ours.isel(where))
    steps = {"step": [0, 20], "token": [63, 7]}
    xr.testing.assert_identical(plain.sel(steps), ours.sel(steps))
    asyncio.run(ours.copy().load_async())
    changed = open_run(path, chunks=None)
    changed.W[0] = 1.0  # in memory
    assert (changed.W[0] == 1.0).all()
    xr.testing.assert_identical(plain.W, open_run(path, chunks=None).W)
    # What is missing is noticed by who needs it, and only then.
    (path / "W" / "c.1.0.0").unlink()
    ours.W[3].load()
    with pytest.raises(FormatError, match=r"^W, block 1: .*is missing"):
        ours.W[:, 3].load()


def test_other_chunks_are_an_error(small_run: tuple[Path, Any]) -> None:
    with pytest.raises(InvalidArgument, match="chunks='auto', expected 'blocks' or None"):
        open_run(small_run[0], chunks="auto")  # type: ignore[arg-type]


def test_dask_chunks_are_whole_inner_chunks(tmp_path: Path) -> None:
    with RunWriter.create(
        tmp_path / "run.zarr",
        token=np.arange(50_257),
        hidden=64,
        variables={"W": "bfloat16", "logits": "bfloat16"},
    ) as run:
        inner = run.layout.arrays["W"].chunk
    ds = open_run(run.path)
    tokens = ds.W.chunksizes["token"]
    assert all(length % inner[1] == 0 for length in tokens[:-1])
    assert tokens[0] * ds.W.chunksizes["step"][0] * 64 * 4 <= 16 << 20


def test_a_zip_file_of_a_run_is_what_the_folder_is(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    packed = Path(shutil.make_archive(str(path), "zip", path))
    folder = open_run(path)
    for chunks in ("blocks", None):
        ds = open_run(packed, chunks=chunks)
        xr.testing.assert_identical(ds, folder)
        assert ds.W[5].values.tobytes() == folder.W[5].values.tobytes()
    xr.testing.assert_identical(ds, xr.open_zarr(ZipStore(packed, mode="r")))
    xr.testing.assert_identical(ds, xr.open_dataset(packed, engine="trajstore"))
    xr.testing.assert_identical(ds.traj.grad_norms(), folder.traj.grad_norms())


def test_a_zip_file_that_is_not_the_content_of_a_run(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    outside = shutil.make_archive(str(path.parent / "outside"), "zip", path.parent, path.name)
    with pytest.raises(FormatError, match=r"no.*zarr\.json at its top; pack .*zip -0r"):
        open_run(outside)
    path.with_suffix(".zip").write_bytes(b"text")
    with pytest.raises(FormatError, match="not a zip file"):
        open_run(path.with_suffix(".zip"))
    with pytest.raises(FormatError, match="unpack a zip file first"):
        export(outside, outside + ".safetensors")


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no run at"):
        open_run(tmp_path / "nothing.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match="not a Zarr v3 group"):
        open_run(tmp_path / "folder")
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(FormatError, match="no trajstore_format"):
        open_run(tmp_path / "other.zarr")
    (tmp_path / "folder" / "zarr.json").write_text('{"zarr_format": 3, "attrib')
    with pytest.raises(FormatError, match="not a Zarr v3 group"):
        open_run(tmp_path / "folder")


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_format_names_the_version_that_reads_it(
    small_run: tuple[Path, Any], number: int
) -> None:
    path, _ = small_run
    root = json.loads((path / "zarr.json").read_bytes())
    root["attributes"] |= {"trajstore_format": number, "trajstore_version": "9.1"}
    (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(
        FormatError, match=rf"format {number}, .*open it with the trajstore 9\.1"
    ) as told:
        open_run(path)
    assert ("export it there to a .safetensors file" in str(told.value)) == (number < FORMAT)


@pytest.mark.parametrize("opened", [open_run, xr.open_zarr])
def test_each_variable_says_which_state_its_rows_belong_to(
    small_run: tuple[Path, Any], opened: Any
) -> None:
    ds = opened(small_run[0])
    assert ds.W.attrs["state"] == "after the step"
    before = {ds[name].attrs["state"] for name in ("grad", "logits", "loss")}
    assert before == {"before the step"}


def test_the_accessor_splits_the_populations(small_run: tuple[Path, Any]) -> None:
    ds = open_run(small_run[0])
    assert ds.traj.dead.token.values.tolist() == [0, 21, 42, 63]
    assert ds.traj.live.sizes["token"] == 6
    assert "grad_norms" in dir(ds.traj)
    xr.testing.assert_identical(
        ds.traj.grad_norms(ord=1).compute(), analysis.grad_norms(ds, ord=1).compute()
    )
    with pytest.raises(AttributeError, match=r"ds\.traj has no 'nonsense'"):
        ds.traj.nonsense  # noqa: B018
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        ds.drop_vars("is_dead").traj.dead  # noqa: B018


def test_a_missing_address_is_an_error() -> None:
    with pytest.raises(RunNotFound, match="there is no run at memory://open/none"):
        open_group("memory://open/none")


def test_a_group_without_a_run_is_refused(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    copied(path / "W", "memory://open/array")
    with pytest.raises(FormatError, match="memory://open/array is not a Zarr v3 group"):
        open_group("memory://open/array")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("file:///tmp/run.zarr", "an unknown kind of address, expected one of s3://, gs://"),
        ("s3://bucket", "names no run; expected SCHEME://BUCKET/KEY"),
        ("s3:///run.zarr", "names no run"),
        ("s3://user:secret@bucket/run.zarr", "credentials come from the environment"),
        ("hf://datasets/user/name", "names no run; expected hf://datasets/USER/NAME/RUN.zarr"),
        ("hf://user//run.zarr", "names no run; expected hf://"),
        ("s3://[bucket/run.zarr", "is not an address: Invalid IPv6 URL"),
        (
            "https://host/run.zarr?signature=1",
            "is not a supported address, expected SCHEME://BUCKET/KEY",
        ),
    ],
)
def test_addresses_that_cannot_be(address: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_group(address)


def _run(path: Path) -> Path:
    with RunWriter.create(
        path, token=[1, 2], hidden=2, variables={"W": "float32"}, block_rows=2
    ) as run:
        for step in range(6):
            run.append(step, W=np.zeros((2, 2), "f4"))
    return path


ARRAYS = "consolidated_metadata.metadata"
HUGE = 1 << 40
ROWS = {
    "attributes.committed_rows": HUGE,
    f"{ARRAYS}.W.shape.0": HUGE,
    f"{ARRAYS}.step.shape.0": HUGE,
}
LONG_BLOCKS = {f"{ARRAYS}.W.chunk_grid.configuration.chunk_shape.0": HUGE}


def _changed(metadata: Path, changes: dict[str, Any]) -> bytes:
    """A root with other members."""
    root = json.loads(metadata.read_bytes())
    for place, value in changes.items():
        put(root, place, value)
    return json.dumps(root).encode()


def annotated(run: Path) -> None:
    annotate_run(run, token_text=["a", "b"])


def is_noticed(run: Path) -> bool:
    try:
        return not verify(run).clean
    except FormatError as error:
        return "announce" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ROWS, r"step has shape \[1099511627776\], but its last block is not stored"),
        (
            {"attributes.committed_rows": HUGE},
            "committed_rows is 1099511627776, expected 6, the rows of its arrays",
        ),
        (
            {f"{ARRAYS}.W.shape.1": HUGE, f"{ARRAYS}.token.shape.0": HUGE},
            r"token\.chunk_grid\.configuration\.chunk_shape\.0 is 2, expected 1099511627776",
        ),
        (
            {f"{ARRAYS}.W.shape.2": HUGE},
            r"W\.shape is .*, expected lengths that blocks of \[2, 2, 2\] cover",
        ),
        (
            LONG_BLOCKS,
            r"chunk_shape is \[1099511627776, 2, 2\], expected .* at most 274,877,906,944",
        ),
        (
            {f"{ARRAYS}.W.chunk_grid.configuration.chunk_shape.0": 1 << 30},
            r"metadata\.W\.codecs\.0\..*, expected at most 65,536 chunks in a block",
        ),
        (
            {"attributes.config": reduce(lambda inner, _: {"a": inner}, range(200), {})},
            "nested more than 100 deep",
        ),
        ({ARRAYS: {"../../x": {}}}, "an invalid name, '../../x'"),
        ("large", "at most 16,777,216"),
        ("pipe", "not a regular file"),
    ],
)
def test_what_is_out_of_all_proportion_is_refused(
    tmp_path: Path, changes: Any, message: str
) -> None:
    metadata = _run(tmp_path / "run.zarr") / "zarr.json"
    if changes == "pipe":
        metadata.unlink()
        os.mkfifo(metadata)
    elif changes == "large":
        metadata.write_text(metadata.read_text() + " " * (17 << 20))
    else:
        metadata.write_bytes(_changed(metadata, changes))
    for opened in (open_group, open_run, RunWriter.resume, annotated):
        with pytest.raises(FormatError, match=message):
            opened(tmp_path / "run.zarr")
    assert is_noticed(tmp_path / "run.zarr")


def test_the_same_at_an_address(tmp_path: Path) -> None:
    metadata = _run(tmp_path / "run.zarr") / "zarr.json"
    far = copied(metadata.parent, "memory://out/of/proportion.zarr")
    for content, message in (
        (metadata.read_bytes() + b" " * (17 << 20), "at most 16,777,216"),
        (_changed(metadata, LONG_BLOCKS), r"chunk_shape is \[1099511627776, 2, 2\], expected"),
        (_changed(metadata, ROWS), r"step has shape .* last block is not stored"),
    ):
        (far / "zarr.json").write_bytes(content)
        for read in (open_run, information, RunWriter.resume):
            with pytest.raises(FormatError, match=message):
                read(far)


def test_a_server_without_ends_is_asked_in_another_way(small_run: tuple[Path, Any]) -> None:
    """As Azure is; most objects of this run are shorter than the end that is asked for."""
    path = small_run[0]
    with web_server(path.parent, ranges=r"bytes=\d") as (server, _):
        xr.testing.assert_identical(
            open_run(path).load(), open_run(f"{server}/{path.name}", chunks=None).load()
        )


def test_a_server_without_ranges_is_reported(small_run: tuple[Path, Any]) -> None:
    path = small_run[0]
    told = pytest.raises(ObjectStoreError, match=r"^http://.*/c.*; runs are read in parts: copy")
    with web_server(path.parent, ranges="none") as (server, _), told:
        open_run(f"{server}/{path.name}").load()


def test_the_runs_of_several_parameters_are_named(tmp_path: Path) -> None:
    _run(tmp_path / "c.wte.weight.zarr")
    with pytest.raises(RunNotFound, match=r"similar names: .*c\.wte\.weight\.zarr$"):
        open_group(tmp_path / "c.zarr")
    with pytest.raises(
        RunNotFound, match=r"no run at .*other\.zarr; runs in .*: c\.wte\.weight\.zarr$"
    ):
        open_group(tmp_path / "other.zarr")


def test_the_runs_in_the_folder_are_named_if_no_name_is_near(tmp_path: Path) -> None:
    for name in "abcdef":
        _run(tmp_path / f"{name}.zarr")
    runs = "a.zarr, b.zarr, c.zarr, d.zarr, e.zarr …"
    with pytest.raises(RunNotFound, match=rf"; runs in {tmp_path}: {runs}$"):
        open_group(tmp_path / "gatsby.zarr")


def test_a_folder_of_runs_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _run(tmp_path / f"{name}.zarr")
    with pytest.raises(FormatError, match=r"a folder of runs; pass .*a\.zarr, or all .*/\*\.zarr$"):
        open_group(tmp_path)


def test_a_run_whose_name_is_mistyped_is_reported(small_run: tuple[Path, Any]) -> None:
    path = small_run[0]
    with pytest.raises(RunNotFound, match=rf"did you mean '{path.name}'\?"):
        open_group(path.with_name(path.name[:-1]))


COORDINATES = ("token", "is_dead", "token_count", "token_text")
BITS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4", "float64": "<u8", "int64": "<u8"}

# The reader: nothing of trajstore, and nothing of zarr.


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def checked(data: bytes, covered: bytes = b"") -> bytes:
    """What stands before a checksum that fits."""
    body, found = data[:-4], int.from_bytes(data[-4:], "little")
    if google_crc32c.value(body + covered) != found:
        raise ValueError("a checksum does not fit")
    return body


def wide(bits: np.ndarray) -> np.ndarray:
    """float32 of the bits of bfloat16."""
    return (bits.astype("u4") << 16).view("f4")


def rounded(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, as float32."""
    bits = values.astype("f4").view("u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype("u4").view("f4")


class Reader:
    """A run."""

    def __init__(self, path: Path) -> None:
        root = json.loads((path / "zarr.json").read_text())
        self.path, self.attributes = path, root["attributes"]
        self.arrays = root["consolidated_metadata"]["metadata"]
        self.rows, self.block_rows = (self.attributes[k] for k in ("committed_rows", "block_rows"))
        self.series = sorted(self.arrays.keys() - set(COORDINATES))
        if self.attributes["trajstore_format"] != 3:
            raise ValueError("this reads format 3")

    def settings(self, name: str) -> dict[str, Any]:
        """All that decides how bytes become values."""
        metadata = self.arrays[name]
        (codec,) = metadata["codecs"]
        configuration = dict(codec["configuration"])
        configuration.pop("runs", None)
        shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        return configuration | {"array": name, "shape": shape}

    def parts(self, name: str) -> int:
        """Objects of a block."""
        shape, chunk = self.arrays[name]["shape"], self.settings(name)["shape"]
        return -(-shape[1] // chunk[1]) if len(shape) > 1 else 1

    def load(self, name: str, block: int, part: int) -> tuple[list[bytes], int, bytes]:
        """Inner chunks of an object, its valid rows and its content."""
        settings = self.settings(name)
        numbers = [block, part, 0][: len(settings["shape"])]
        data = (self.path / name / ".".join(["c", *map(str, numbers)])).read_bytes()
        grid = [w // p for w, p in zip(settings["shape"], settings["chunk_shape"], strict=True)]
        start = len(data) - 16 * int(np.prod(grid)) - 4
        index = checked(data[start:])
        label = checked(data[start - 140 : start], index)
        magic, run, array, *place, rows, encoded, content = struct.unpack(
            "<8s16s32sQII32s32s", label
        )
        runs = self.attributes["runs"]
        allowed = {who for _, who in runs[sum(first <= block for first, _ in runs) - 1 :]}
        assert (magic, array.rstrip(b"\0").decode(), place) == (b"trajblk2", name, [block, part])
        assert run.hex() in allowed
        assert encoded == sha256(canonical(settings))
        assert rows >= min(self.rows - block * self.block_rows, self.block_rows)
        entries = np.frombuffer(index, "<u8").reshape(-1, 2).tolist()
        pieces = [data[offset : offset + length] for offset, length in entries]
        assert content == sha256(b"".join(map(sha256, pieces)))
        return pieces, rows, content

    def decode(self, name: str, piece: bytes) -> np.ndarray:
        """Native bits of an inner chunk; of numbers of a step bits of the stored type."""
        settings = self.settings(name)
        frame, shape = checked(piece), settings["chunk_shape"]
        bits = np.dtype(BITS[settings["native_dtype"]])
        if settings["kind"] in ("predicted", "computed"):
            form, frame = frame[0], frame[1:]
            if form == 1 and settings["kind"] == "predicted":
                return self.predicted(settings, frame)
            if form == 1:  # after the number of skipped steps, the first row and the corrections
                frame, out = frame[4:], np.zeros(shape, bits)
                (length,) = struct.unpack("<I", frame[12:16])
                out[0] = np.frombuffer(blosc.decompress(frame[:length]), bits).reshape(shape[1:])
                if left := frame[length:]:  # not all corrections are 0
                    out[1:].flat = np.frombuffer(blosc.decompress(left), bits)
                return out
        size = int(np.prod(shape)) * bits.itemsize
        assert struct.unpack("<II", frame[4:8] + frame[12:16]) == (size, len(frame))
        axes = list(range(len(shape)))
        if settings["token_first"]:
            axes = [1, 0, *axes[2:]]
        z = np.frombuffer(blosc.decompress(frame), bits).reshape([shape[axis] for axis in axes])
        z = z.transpose(np.argsort(axes))
        if settings["kind"] == "plain":
            return z
        return np.add.accumulate((z >> 1) ^ -(z & 1), axis=0, dtype=bits)

    def predicted(self, settings: dict[str, Any], frame: bytes) -> np.ndarray:
        """Native bits of a predicted inner chunk of bfloat16."""
        (length,), (rows, tokens, hidden) = struct.unpack("<I", frame[:4]), settings["chunk_shape"]
        terms = np.frombuffer(blosc.decompress(frame[4 : 4 + length]), "<u2")
        terms = wide(terms.reshape(rows, -1, hidden + tokens))
        z = np.frombuffer(blosc.decompress(frame[4 + length :]), "<u2")
        total = np.zeros((rows, tokens, hidden), "f4")
        for term in range(terms.shape[1]):
            total += terms[:, term, hidden:, None] * terms[:, term, None, :hidden]
        order = lambda b: np.where(b & 0x8000, ~b, b | 0x8000)  # noqa: E731
        d = ((z >> 1) ^ -(z & 1)).reshape(total.shape)
        o = (order(rounded(total).view("u4").astype("u8") >> 16) + d).astype("u2")
        return np.where(o & 0x8000, o & 0x7FFF, ~o)

    def computed(self) -> dict[str, np.ndarray]:
        """Native bits of the arrays that are computed, of a run of bfloat16 and AdamW."""
        names = ("W", "exp_avg", "exp_avg_sq")
        rule = self.settings("W")["rule"]["optimizer"]
        whole = {name: self.bits(name).copy() for name in (*names, "grad")}
        step, lr = self.bits("step").astype("i8"), self.bits("lr").view("f8")
        f4, f8 = np.float32, np.float64
        for t in range(self.rows):
            if t % self.block_rows == 0:
                continue
            W, m, v = (wide(whole[name][t - 1]) for name in names)
            g, n = wide(whole["grad"][t]), int(step[t])
            W = rounded(W * f4(1 - lr[t] * rule["weight_decay"]))
            m = rounded(f4((g - m).astype(f8) * f8(f4(1 - rule["beta1"])) + m))
            v = rounded(v * f4(rule["beta2"]))
            v = rounded(f4((g * f4(1 - rule["beta2"])).astype(f8) * g + v))
            s = rounded(rounded(np.sqrt(v)) / f4((1 - rule["beta2"] ** n) ** 0.5))
            s = rounded(s + rounded(f4([rule["eps"]])))
            W = rounded(W + f4(-lr[t] / (1 - rule["beta1"] ** n)) * m / s)
            for name, made in zip(names, (W, m, v), strict=True):
                whole[name][t] ^= (made.view("u4") >> 16).astype("u2")
        return whole

    def bits(self, name: str) -> np.ndarray:
        """Bits of a whole array, as `decode` gives them."""
        settings, shape = self.settings(name), self.arrays[name]["shape"]
        blocks, parts, whole = -(-self.rows // self.block_rows), self.parts(name), settings["shape"]
        lengths = [blocks * whole[0], *([parts * whole[1], *whole[2:]] if whole[1:] else [])]
        out = np.empty(lengths, BITS[settings["native_dtype"]])
        for block, part in itertools.product(range(blocks), range(parts)):
            corner = [block, part, 0][: len(shape)]
            pieces = iter(self.load(name, block, part)[0])
            grid = [w // p for w, p in zip(whole, settings["chunk_shape"], strict=True)]
            for at in itertools.product(*map(range, grid)):
                first = [c * w + a * p for c, w, a, p in
                         zip(corner, whole, at, settings["chunk_shape"], strict=True)]  # fmt: skip
                window = [slice(f, f + p) for f, p in
                          zip(first, settings["chunk_shape"], strict=True)]  # fmt: skip
                out[tuple(window)] = self.decode(name, next(pieces))
        return out[tuple(map(slice, shape))]

    def digests(self) -> tuple[str, str]:
        """Content digest and fingerprint."""
        arrays, stored = json.loads(json.dumps(self.arrays)), {}
        for name, metadata in arrays.items():
            metadata["attributes"].pop("root_attributes", None)
            for codec in metadata["codecs"]:
                codec.get("configuration", {}).pop("runs", None)
            if name in self.series:
                metadata["shape"][0] = 0
            else:
                stored[f"{name}/c.0"] = sha256((self.path / name / "c.0").read_bytes()).hex()
        tip = sha256(canonical({"arrays": arrays, "coordinates": stored}))
        for block in range(-(-self.rows // self.block_rows)):
            held = min(self.rows - block * self.block_rows, self.block_rows)
            entries = b""
            for name in self.series:
                for part in range(self.parts(name)):
                    _, rows, content = self.load(name, block, part)
                    assert rows == held
                    entries += name.encode() + b"\0" + struct.pack("<II32s", part, rows, content)
            tip = sha256(tip + sha256(entries))
        changing = {"status", "committed_rows", "updated", "content_digest", "fingerprint"}
        fixed = {name: value for name, value in self.attributes.items() if name not in changing}
        if "provenance" in fixed:
            kept = fixed["provenance"].items()
            fixed["provenance"] = {name: value for name, value in kept if name != "resumed"}
        return tip.hex(), sha256(sha256(canonical(fixed)) + tip).hex()


# The test.


RECORDED_ROWS, TOKENS, HIDDEN = 31, 23, 3
TYPES = {"W": "bfloat16", "grad": "float16", "exp_avg": "float32", "logits": "bfloat16",
         "loss": "float32", "lr": "float64"}  # fmt: skip
SHAPES = {"W": (TOKENS, HIDDEN), "grad": (TOKENS, HIDDEN), "exp_avg": (TOKENS, HIDDEN),
          "logits": (TOKENS,), "loss": (), "lr": ()}  # fmt: skip


def random_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(13)
    return {
        name: np.frombuffer(
            rng.bytes(RECORDED_ROWS * int(np.prod(shape)) * np.dtype(BITS[TYPES[name]]).itemsize),
            BITS[TYPES[name]],
        ).reshape(RECORDED_ROWS, *shape)
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Blocks of 12 rows, the last one of 7, in several parts, each in several inner chunks."""
    from trajstore import RunWriter

    plan = "trajstore.store.metadata.block_plan."
    for name, value in {"_SMALL_ROW": 0, "_LARGEST_OBJECT": 12 * HIDDEN * 4 * 10, "_CHUNK": 600,
                        "_CHUNK_OF_HISTORIES": 300, "_FEWEST_TOKENS": 3}.items():  # fmt: skip
        monkeypatch.setattr(plan + name, value)
    path = tmp_path / "run.zarr"
    values = random_rows()
    with RunWriter.create(
        path,
        token=np.arange(TOKENS) * 3,
        hidden=HIDDEN,
        variables=TYPES,
        is_dead=np.arange(TOKENS) % 2 == 0,
        token_count=np.arange(TOKENS) % 2,
        token_text=['é𝄞\n"\\\x7f' + str(number) for number in range(TOKENS)],
        config={
            "text": 'é𝄞\n"\\\x7f',
            "lr": 1e-05,
            "rows": 2,
            "eps": 1e16,
            "beta": 0.5,
            "one": 1.0,
        },
        attributes={"provenance": {"host": "é", "resumed": [{"step": 1}]}},
        block_rows=12,
    ) as writer:
        for row in range(RECORDED_ROWS):
            for name, place in writer.next_row().items():
                place[...] = values[name][row]
            writer.commit_row(2 * row)
    return path


def test_a_reader_by_the_specification_reads_the_same_bits_and_digests(run: Path) -> None:
    reader = Reader(run)
    assert [reader.parts(name) for name in ("W", "grad", "logits", "loss")] == [3, 3, 1, 1]
    assert reader.settings("W")["token_first"]
    assert all(len(reader.load(name, 0, 0)[0]) > 1 for name in ("W", "grad", "exp_avg"))
    for name, bits in random_rows().items():
        assert (reader.bits(name) == bits).all(), name
    assert reader.bits("step").tolist() == list(range(0, 2 * RECORDED_ROWS, 2))
    attributes = reader.attributes
    assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])


def test_a_reader_by_the_specification_computes_the_rows_of_a_replay_run(tmp_path: Path) -> None:
    from trajstore import RunWriter, open_run, sample_run

    ds = open_run(sample_run(tmp_path / "sample.zarr")).isel(step=slice(0, 40)).load()
    optimizer = ds.attrs["optimizer"] | {"class": "torch.optim.adamw.AdamW"}  # corrected at times
    names = ("W", "grad", "exp_avg", "exp_avg_sq", "lr")
    path = tmp_path / "run.zarr"
    with RunWriter.create(
        path,
        token=ds.token.values,
        hidden=ds.sizes["hidden"],
        variables={name: ds[name].attrs["native_dtype"] for name in names},
        attributes={"optimizer": optimizer},
        block_rows=16,
        encoding="compact",
    ) as writer:
        for row, step in enumerate(ds.step.values):
            writer.append(step=int(step), **{name: ds[name].values[row] for name in names})
    reader = Reader(path)
    forms = [reader.load(name, 1, 0)[0][0][0] for name in names[:4]]
    assert forms == [1, 1, 1, 1]
    for name, bits in reader.computed().items():
        assert (wide(bits).view("u4") == ds[name].values.view("u4")).all(), name
    attributes = reader.attributes
    assert attributes["encoding"] == "compact"
    assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])


@pytest.mark.parametrize("engine", ["trajstore", TrajstoreBackend, None])
def test_it_opens_a_run_also_where_nobody_names_it(
    small_run: tuple[Path, Any], engine: Any
) -> None:
    path, _ = small_run
    expected = xr.open_zarr(path).load()
    for given in (path, str(path)):
        ds = xr.open_dataset(given, engine=engine)
        assert ds.W.chunks is None
        assert not ds.W.variable._in_memory
        xr.testing.assert_identical(ds.load(), expected)


def test_with_chunks_it_has_one_of_dask_for_each_object(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    ds = xr.open_dataset(path, engine="trajstore", chunks={})
    assert ds.W.chunksizes == {"step": (4, 4, 3), "token": (10,), "hidden": (6,)}
    assert ds.loss.chunksizes == {"step": (4, 4, 3)}
    xr.testing.assert_identical(ds.load(), xr.open_zarr(path).load())


def test_dask_chunks_are_the_objects_of_a_block(tmp_path: Path) -> None:
    bits = divided_run(tmp_path / "run.zarr", large=False)
    W = open_run(tmp_path / "run.zarr").W
    assert W.chunks == ((4, 4, 3), (102, 102, 96), (3,))
    assert (W.values.view("u4") == bits.astype("u4") << 16).all()
    objects = sorted(file.name for file in (tmp_path / "run.zarr" / "W").glob("c.1.*"))
    assert objects == ["c.1.0.0", "c.1.1.0", "c.1.2.0"]


def test_variables_can_be_left_out(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    for names in (["grad", "logits", "token_text"], "grad"):
        ds = xr.open_dataset(path, engine="trajstore", drop_variables=names)
        xr.testing.assert_identical(ds.load(), xr.open_zarr(path).drop_vars(names).load())


def test_it_takes_runs_for_its_own_and_nothing_else(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    engine = TrajstoreBackend()
    assert engine.guess_can_open(small_run[0])
    assert engine.guess_can_open(str(small_run[0]))
    zarr.create_group(tmp_path / "theirs.zarr")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.zarr").mkdir()
    (tmp_path / "broken.zarr" / "zarr.json").write_text("{")
    (tmp_path / "list.zarr").mkdir()
    (tmp_path / "list.zarr" / "zarr.json").write_text('["attributes"]')
    (tmp_path / "file.nc").write_bytes(b"CDF")
    for other in ("theirs.zarr", "folder", "broken.zarr", "list.zarr", "file.nc", "nothing"):
        assert not engine.guess_can_open(tmp_path / other)
    assert not engine.guess_can_open("s3://bucket/run.zarr")
    for other in (b"bytes", 3, None, {}, open_run(small_run[0])):
        assert not engine.guess_can_open(other)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_copy_that_xarray_makes_reads_the_same(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = small_run
    xr.open_zarr(path).to_zarr(tmp_path / "copy.zarr")
    expected = xr.open_zarr(path).load()
    for again in (xr.open_zarr, open_run):
        ds = again(tmp_path / "copy.zarr")
        for name in expected.variables:
            assert ds[name].dtype == expected[name].dtype
            assert ds[name].values.tobytes() == expected[name].values.tobytes() or (
                expected[name].dtype.kind not in "fiu"
                and (ds[name].values == expected[name].values).all()
            ), name
    array = zarr.open_array(tmp_path / "copy.zarr" / "W")
    (codec,) = array.metadata.codecs
    if isinstance(codec, BlockCodec):
        data = (tmp_path / "copy.zarr" / "W" / "c" / "1" / "0" / "0").read_bytes()
        form = codec.form(array.chunks)
        assert form.read_tail(data[-form.tail_length :], (1, 0)).label.block == ANYWHERE


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_selections_can_be_written_with_xarray(small_run: tuple[Path, Any], tmp_path: Path) -> None:
    """Plain zarr keeps the encoding of the run, and says what to do."""
    for number, ds in enumerate((open_run(small_run[0]), open_run(small_run[0], chunks=None))):
        one, joined = ds.isel(step=5), xr.concat([ds.isel(step=[0]), ds.isel(step=[5])], "step")
        for name, selected in {"one": one, "token": ds.isel(token=1), "joined": joined}.items():
            selected.to_zarr(tmp_path / f"{name}{number}.zarr")
            written = xr.open_zarr(tmp_path / f"{name}{number}.zarr")
            xr.testing.assert_identical(written.compute(), selected.compute())
    plain = xr.open_zarr(small_run[0]).isel(step=5)
    with pytest.raises(ValueError, match=r"ds\.drop_encoding\(\)\.to_zarr"):
        plain.to_zarr(tmp_path / "plain.zarr")
    plain.drop_encoding().to_zarr(tmp_path / "plain.zarr", mode="w")
