"""A second reader, from docs/reference/format.md alone, and what it returns for runs of ours."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from compact_runs import RULE_ARRAYS, same_bits, scheduled_run
from damage import divided_run
from golden_runs import DATA, unpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from trajstore import RunWriter, open_run, verify
from trajstore.codec.block_codec import BlockCodec
from trajstore.errors import FormatError
from trajstore.store.metadata.block_plan import plan
from trajstore.store.reading.array_reader import StoredArray, block_form, stored_array
from trajstore.store.reading.open_group import open_group
from trajstore.values.native_types import native_type, widen

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
        self.series = sorted(
            name for name, array in self.arrays.items() if array["dimension_names"][0] == "step"
        )
        if self.attributes["trajstore_format"] not in (3, 4):
            raise ValueError("this reads formats 3 and 4")

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
        """Native bits of an inner chunk; of kind `computed`, the first row and differences only."""
        settings = self.settings(name)
        frame, shape = checked(piece), settings["chunk_shape"]
        bits = np.dtype(BITS[settings["native_dtype"]])
        if settings["kind"] in ("predicted", "computed"):
            form, frame = frame[0], frame[1:]
            if form:
                return self.predicted(settings, frame)
        size = int(np.prod(shape)) * bits.itemsize
        assert struct.unpack("<II", frame[4:8] + frame[12:16]) == (size, len(frame))
        axes = list(range(len(shape)))
        if settings["token_first"]:
            axes = [1, 0, *axes[2:]]
        z = np.frombuffer(blosc.decompress(frame), bits).reshape([shape[axis] for axis in axes])
        z = z.transpose(np.argsort(axes))
        if settings["kind"] in ("plain", "native"):
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

    def values(self, name: str) -> np.ndarray:
        """A whole array, in the stored type."""
        native, bits = self.settings(name)["native_dtype"], self.bits(name)
        if native == "bfloat16":
            return wide(bits)
        if native == "float16":
            return bits.view("f2").astype("f4")
        return bits.view(np.dtype(native))

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
        changing = {"status", "committed_rows", "updated", "content_digest", "fingerprint", "notes"}
        fixed = {name: value for name, value in self.attributes.items() if name not in changing}
        if "provenance" in fixed:
            kept = fixed["provenance"].items()
            fixed["provenance"] = {name: value for name, value in kept if name != "resumed"}
        return tip.hex(), sha256(sha256(canonical(fixed)) + tip).hex()


# The test.


def test_a_reader_by_the_specification_reads_the_same_bits_and_digests(
    small_run: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Of blocks of several parts and inner chunks, and of all that the digests cover."""
    numbers = {"lr": 1e-05, "eps": 1e16, "one": 1.0, "rows": 2}
    attributes = {
        "config": {"text": 'é𝄞\n"\\\x7f', **numbers},
        "provenance": {"host": "é", "resumed": [{"step": 1}]},
    }
    RunWriter.resume(small_run[0], attributes=attributes).close()
    divided = tmp_path / "divided.zarr", {"W": divided_run(tmp_path / "divided.zarr", large=True)}
    for path, values in (small_run, divided):
        reader = Reader(path)
        for name, bits in values.items():
            assert (reader.bits(name) == bits).all(), name
        assert reader.bits("step").tolist() == open_run(path).step.values.tolist()
        attributes = reader.attributes
        assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])
    assert reader.settings("W")["token_first"]
    assert reader.parts("W") == 3
    assert len(reader.load("W", 0, 0)[0]) == 6


def test_the_specification_says_where_changing_hyperparameters_are(tmp_path: Path) -> None:
    """Beside the first row of a block; the rule gives the others, so there are no corrections."""
    reader = Reader(scheduled_run(tmp_path / "run.zarr"))
    frame = checked(reader.load("W", 0, 0)[0][0])
    assert frame[:5] == b"\2\0\0\0\0"  # its form, and no skipped steps
    (length,) = struct.unpack("<I", frame[17:21])
    numbers = np.frombuffer(blosc.decompress(frame[5 : 5 + length]), "<f8").reshape(6, -1)
    assert numbers[:4, 0].tolist() == [0.9, 0.999, 1e-8, 0.1]  # those of the rule
    assert (reader.values("hyperparameters")[1:8] == numbers[[0, 3], 1:].T).all()
    first = np.frombuffer(blosc.decompress(frame[5 + length :]), "<u2")
    assert (wide(first) == open_run(reader.path).W.values[0].ravel()).all()
    attributes = reader.attributes
    assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULE_ARRAYS)
def test_an_array_with_more_rows_of_a_block_than_the_others_is_read(
    name: str, tmp_path: Path
) -> None:
    """As a process leaves it that died between the replacement of two objects."""
    whole, path = scheduled_run(tmp_path / "whole.zarr"), tmp_path / "run.zarr"
    rows = open_run(whole).load()

    def go_on(first: int, stop: int) -> None:
        with RunWriter.resume(path, rows=first) as run:
            for row in range(first, stop):
                run.append(row, **{each: rows[each].values[row] for each in rows.data_vars})
            run.close("interrupted")

    shutil.copytree(whole, path)
    go_on(17, 18)
    assert (path / name / "c.2.0.0").read_bytes() != (whole / name / "c.2.0.0").read_bytes()
    shutil.copy(whole / name / "c.2.0.0", path / name)
    same_bits(whole, path, 18)
    assert verify(path).clean
    go_on(18, 20)
    assert same_bits(whole, path).sizes["step"] == 20
    assert verify(path).clean


@pytest.mark.nightly
def test_a_reader_by_the_specification_reads_all_earlier_runs(tmp_path: Path) -> None:
    for archive in DATA.glob("runs-*.zip"):
        folder = unpack(tmp_path, archive.stem.removeprefix("runs-"))
        written = json.loads((folder / "digests.json").read_text())
        for name, run in written.items():
            reader = Reader(folder / name)
            for series in reader.series:
                if reader.settings(series)["kind"] == "computed":
                    continue
                values = np.ascontiguousarray(reader.values(series))
                assert sha256(values.tobytes()).hex() == run["values"][series], (name, series)
            attributes = reader.attributes
            assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])


SHAPE = (11, 300, 3)


def reader(path: Path, name: str = "W") -> StoredArray:
    array = open_group(path)[name]
    assert isinstance(array, zarr.Array)
    found = stored_array(path, name, array)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=["small", "large"])
def stored(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[StoredArray, np.ndarray]:
    """An array of several chunks a shard and several shards a block, and its native bits."""
    path, large = tmp_path_factory.mktemp("stored") / "run.zarr", request.param == "large"
    bits = divided_run(path, large=large)
    array = reader(path)
    assert array.parts == 3
    assert array.chain.token_first == large
    assert array.form.grid == ((2, 3, 1) if large else (1, 3, 1))
    return array, bits


def segment(length: int) -> st.SearchStrategy[slice]:
    """Slices forwards and without gaps, as whoever reads asks for them; also of nothing."""
    end = st.none() | st.integers(-length, length)
    return st.builds(slice, end, end)


@pytest.mark.parametrize("threads", [1, 3])
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 3).flatmap(lambda count: st.tuples(*map(segment, SHAPE[:count]))))
def test_slices_are_what_numpy_would_pick(
    stored: tuple[StoredArray, np.ndarray], threads: int, key: tuple[slice, ...]
) -> None:
    whole, bits = stored
    array = replace(whole, threads=threads)
    found, values = array.bits(key), array.values(key)
    assert found.dtype == bits.dtype
    assert found.shape == bits[key].shape
    assert found.tobytes() == bits[key].tobytes()
    assert values.dtype == np.float32
    expected = widen(bits, native_type("bfloat16"))
    assert values.tobytes() == expected[key].tobytes()


def test_many_shards_are_opened_side_by_side(stored: tuple[StoredArray, np.ndarray]) -> None:
    """Two threads wait for a shard each: a slow disk is asked for both at once."""
    array, bits = stored
    together = threading.Barrier(2, timeout=30)
    waited: set[int] = set()

    class Waiting(StoredArray):
        def opened(self, *arguments: Any) -> Any:
            if threading.get_ident() not in waited:
                waited.add(threading.get_ident())
                together.wait()
            return super().opened(*arguments)

    waiting = Waiting(
        path=array.path, name=array.name, shape=array.shape, form=array.form, threads=2
    )
    assert waiting.bits(()).tobytes() == bits.tobytes()  # of nine shards
    assert len(waited) == 2


def test_an_array_stored_otherwise_is_left_to_zarr(tmp_path: Path) -> None:
    keys = {"name": "default", "configuration": {"separator": "."}}
    chain = plan({"W": "float32"}, tokens=4, hidden=2, block_rows=4).arrays["W"].chain
    codec = BlockCodec(array="W", chunk_shape=(2, 2), chain=chain, runs=((0, "5a" * 16),))
    for number, (key, compressors, is_ours) in enumerate(
        ((keys, None, True), (None, None, False), (keys, "auto", False))
    ):
        arguments: Any = {"serializer": codec, "compressors": compressors, "filters": None}
        array = zarr.create_array(
            tmp_path / str(number), shape=(4, 4), dtype="float32", chunks=(4, 4),
            chunk_key_encoding=key, **arguments,
        )  # fmt: skip
        assert (block_form(array) is not None) is is_ours


def test_a_broken_block_is_named_and_closed(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    array, shard = reader(path), path / "W" / "c.1.0.0"
    data = shard.read_bytes()
    array.bits(())
    before = len(os.listdir("/proc/self/fd"))
    for broken in (data[:40] + b"x" + data[41:], data[:-50]):
        shard.write_bytes(broken)
        for read in (array.bits, array.values):
            with pytest.raises(FormatError, match=r"^W, block 1.*; the run is damaged$"):
                read((slice(5, 6),))
        array.bits((slice(1, 2),))  # the other blocks are as good as before
    assert len(os.listdir("/proc/self/fd")) == before  # no file stays open
