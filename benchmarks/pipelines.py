"""Comparison of codecs for a block: the same chunks stored in two ways, read by `xr.open_zarr`.

    python benchmarks/pipelines.py [--rows 96] [--rounds 5]

``block``: `trajstore.block`, one codec for the whole object, as in runs. ``sharded-fused``: zarr's
`sharding_indexed` with one codec per chunk. Each is read by zarr's default pipeline and, if this
version of zarr has it, by its `FusedCodecPipeline`. The data is W of Wordybird; the ratios are to
h5py on chunks of one step.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr
import zarr
from history import wordybird
from measure import alternate, cache, machine, save, table
from zarr.abc.codec import ArrayBytesCodec
from zarr.registry import register_codec

from trajstore import RunWriter
from trajstore.codec.chunk import Chain, Decoder
from trajstore.store.reading.array_reader import stored_array
from trajstore.values.native_types import narrow

FUSED = "benchmark.fused"
NEWER = "zarr.core.codec_pipeline.FusedCodecPipeline"


@dataclass(frozen=True)
class FusedCodec(ArrayBytesCodec):
    """All codecs of an inner chunk in one codec."""

    chain: Chain
    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FusedCodec:
        """Create the codec from the metadata of an array."""
        return cls(Chain.from_facts(data["configuration"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata of the codec."""
        return {"name": FUSED, "configuration": self.chain.facts()}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Raise an error, because the size is unknown; zarr calls it for fixed sizes only."""
        raise NotImplementedError  # like zarr's own compressors

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        out = np.empty(chunk_spec.shape, "f4")
        window = tuple(slice(0, length) for length in chunk_spec.shape)
        Decoder(self.chain, tuple(chunk_spec.shape)).decode(chunk_bytes.to_bytes(), window, out)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out)

    def _encode_sync(self, chunk_array: Any, chunk_spec: Any) -> Any:
        bits = narrow(chunk_array.as_numpy_array(), self.chain.native)
        data = self.chain.encode(bits, tuple(chunk_spec.shape))
        return chunk_spec.prototype.buffer.from_bytes(data)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    async def _encode_single(self, chunk_array: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._encode_sync, chunk_array, chunk_spec)


register_codec(FUSED, FusedCodec)


def write(folder: Path, bits: np.ndarray) -> dict[str, Path]:
    """Write the same chunks of W to two stores."""
    paths = {name: folder / f"{name}.zarr" for name in ("block", "sharded-fused")}
    with RunWriter.create(
        paths["block"],
        token=np.arange(bits.shape[1]),
        hidden=bits.shape[2],
        variables={"W": "bfloat16"},
        block_rows=16,
    ) as run:
        for step in range(len(bits)):
            run.append(step=step, W=np.array(bits[step]))
    group = zarr.open_group(paths["block"], mode="r")
    stored = stored_array(paths["block"], "W", group["W"])
    assert stored is not None
    values = widened(bits)
    fused = {"serializer": FusedCodec(stored.chain), "compressors": None, "filters": None}
    array = zarr.create_group(paths["sharded-fused"]).create_array(
        "W",
        shape=bits.shape,
        dtype="f4",
        chunks=stored.chunk,
        shards=stored.shard,
        dimension_names=("step", "token", "hidden"),
        **fused,
    )
    array[...] = values
    zarr.consolidate_metadata(paths["sharded-fused"])
    return paths


def widened(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32, as users of HDF5 do."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps of the history to read")
    options = parser.parse_args()
    bits = wordybird(options.steps)["W"][: options.rows]
    folder = cache() / "scratch-pipelines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = machine()
    paths = write(folder, bits)
    with h5py.File(folder / "W.h5", "w") as file:
        data = file.create_dataset("W", bits.shape, "u2", chunks=(1, *bits.shape[1:]))
        for step in range(len(bits)):
            data[step] = bits[step]
    hdf5 = h5py.File(folder / "W.h5")["W"]
    middle = len(bits) // 2
    questions: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
        "full scan": (
            lambda W: W.max().values,
            lambda: max(widened(hdf5[step]).max() for step in range(len(bits))),
        ),
        "one step": (lambda W: W[middle].values, lambda: widened(hdf5[middle])),
        "one token": (lambda W: W[:, 27_001].values, lambda: widened(hdf5[:, 27_001])),
    }
    pipelines = {"default pipeline": zarr.config.get("codec_pipeline.path")}
    if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pipelines["fused pipeline"] = NEWER
    arrays = {}
    for pipeline, path in pipelines.items():
        with zarr.config.set({"codec_pipeline.path": path}):
            for name, store in paths.items():
                arrays[f"{name}, {pipeline}"] = xr.open_zarr(store).W
    rows, results = [], {}
    for question, (ask, reference) in questions.items():
        contenders = {
            name: lambda W=W, ask=ask: (ask(W), (1.0, {}))[1] for name, W in arrays.items()
        }
        contenders["h5py"] = lambda reference=reference: (reference(), (1.0, {}))[1]
        measured = alternate(contenders, options.rounds)
        seconds = {name: 1 / item.rate for name, item in measured.items()}
        results[question] = seconds
        rows += [
            [question, name, f"{second * 1e3:,.1f}", f"{seconds['h5py'] / second:.2f}"]
            for name, second in seconds.items()
        ]
    title = f"W of {len(bits)} Wordybird steps, plain xr.open_zarr, zarr {zarr.__version__}"
    text = table(title, ["question", "stored as", "ms", "× h5py's speed"], rows)
    save(f"pipelines-{zarr.__version__}", text, {"machine": facts, "seconds": results})
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
