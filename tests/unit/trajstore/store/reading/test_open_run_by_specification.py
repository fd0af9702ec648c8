"""A second reader, from docs/reference/format.md alone, and what it returns for runs of ours."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from compact_runs import RULE_ARRAYS, same_bits, scheduled_run
from damage import divided_run
from golden_runs import DATA, unpack
from numcodecs import blosc

from trajstore import RunWriter, open_run, verify

CHANGING = ("beta1", "beta2", "eps", "weight_decay", "momentum", "dampening")
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


def adamw(
    rule: dict[str, Any],
    W: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    lr: float,
    n: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A step in bfloat16."""
    f4, f8 = np.float32, np.float64
    W = rounded(W * f4(1 - lr * rule["weight_decay"]))
    m = rounded(f4((g - m).astype(f8) * f8(f4(1 - rule["beta1"])) + m))
    v = rounded(v * f4(rule["beta2"]))
    v = rounded(f4((g * f4(1 - rule["beta2"])).astype(f8) * g + v))
    s = rounded(rounded(np.sqrt(v)) / f4((1 - rule["beta2"] ** n) ** 0.5))
    s = rounded(s + rounded(f4([rule["eps"]])))
    return rounded(W + f4(-lr / (1 - rule["beta1"] ** n)) * m / s), m, v


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
        # Of each block of W. If another process writes or died, they may differ in the number of
        # rows from those of other arrays.
        self.changing: list[dict[str, np.ndarray]] = []

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
        """Native bits of an inner chunk; of kind `computed`, after the first row, corrections."""
        settings = self.settings(name)
        frame, shape = checked(piece), settings["chunk_shape"]
        bits = np.dtype(BITS[settings["native_dtype"]])
        if settings["kind"] in ("predicted", "computed"):
            form, frame = frame[0], frame[1:]
            if form == 1 and settings["kind"] == "predicted":
                return self.predicted(settings, frame)
            if form:  # after the number of skipped steps, the first row and the corrections
                frame, out = frame[4:], np.zeros(shape, bits)
                if form == 2:  # before them, hyperparameters
                    (length,) = struct.unpack("<I", frame[12:16])
                    numbers = np.frombuffer(blosc.decompress(frame[:length]), "<f8").reshape(6, -1)
                    self.changing.append(dict(zip(CHANGING, numbers, strict=True)))
                    frame = frame[length:]
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

    def computed(self, W: str, m: str, v: str, g: str) -> dict[str, np.ndarray]:
        """Native bits of the arrays that are computed, of a run of bfloat16 and AdamW."""
        self.changing.clear()
        whole = {name: self.bits(name).copy() for name in (W, m, v, g)}
        rule = self.settings(W)["rule"]
        clip = self.values("clip_coef")[:, None]
        if "vectors" in rule:
            vectors, lr = rule["vectors"], self.values("params_lr")
            count = self.values("params_count")
            firsts = [first for first, _, _ in vectors["segments"]]
            parts = [
                (slice(first, last), vectors["groups"][group], lr[:, group], count[:, parameter])
                for (first, group, parameter), last in
                zip(vectors["segments"], [*firsts[1:], None], strict=True)
            ]  # fmt: skip
        else:
            parts = [(slice(None), rule["optimizer"], self.values("lr"), self.values("step"))]
        for t in range(self.rows):
            if t % self.block_rows == 0:
                continue
            block, row = divmod(t, self.block_rows)
            changing = self.changing[block] if self.changing else {}
            for where, first, lr, count in parts:
                changed = {n: each[row] for n, each in changing.items() if first.get(n) == each[0]}
                before = [wide(whole[name][t - 1][where]) for name in (W, m, v)]
                made = before
                if np.isfinite(lr[t]) and count[t] == count[t - 1] + 1:
                    gradient = wide(whole[g][t][where])
                    if clip[t] != 1 and clip[t] == clip[t]:
                        gradient = rounded(gradient * clip[t])
                    made = adamw(first | changed, *before, gradient, lr[t], count[t])
                for name, values in zip((W, m, v), made, strict=True):
                    whole[name][t][where] ^= (values.view("u4") >> 16).astype("u2")
        return {name: whole[name] for name in (W, m, v)}

    def values(self, name: str) -> np.ndarray:
        """A whole array, in the stored type."""
        settings, bits = self.settings(name), None
        if settings["kind"] == "computed":
            prefix = "params_" if name.startswith("params") else ""
            first = "params" if prefix else "W"
            names = (first, f"{prefix}exp_avg", f"{prefix}exp_avg_sq", f"{prefix}grad")
            bits = self.computed(*names)[name]
        else:
            bits = self.bits(name)
        native = settings["native_dtype"]
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


def test_a_reader_by_the_specification_reads_changing_hyperparameters(tmp_path: Path) -> None:
    reader = Reader(scheduled_run(tmp_path / "run.zarr"))
    for name in reader.series:
        np.testing.assert_array_equal(reader.values(name), open_run(reader.path)[name].values)
    attributes = reader.attributes
    assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULE_ARRAYS)
def test_an_array_with_more_rows_of_a_block_than_the_others_is_read(
    name: str, tmp_path: Path
) -> None:
    """As a process leaves it that died between the replacement of two objects."""
    path = tmp_path / "run.zarr"

    def keep(run: RunWriter) -> None:
        if run.rows == 18:
            run.commit()
            shutil.copytree(run.path, path)

    whole = scheduled_run(tmp_path / "whole.zarr", on_row=keep)
    shutil.copy(whole / name / "c.2.0.0", path / name)
    ds = same_bits(whole, path, 18)
    for each in RULE_ARRAYS:
        assert (Reader(path).values(each) == ds[each].values).all(), each
    assert verify(path).clean
    more = open_run(whole).isel(step=slice(18, None)).load()
    with RunWriter.resume(path) as run:
        for row, step in enumerate(more.step.values.tolist()):
            run.append(step, **{each: more[each].values[row] for each in more.data_vars})
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
                values = np.ascontiguousarray(reader.values(series))
                assert sha256(values.tobytes()).hex() == run["values"][series], (name, series)
            attributes = reader.attributes
            assert reader.digests() == (attributes["content_digest"], attributes["fingerprint"])
