"""The writer against the simplest thing that could be right: a list of rows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from still_timer import commit_now

from trajstore import RunWriter
from trajstore.store.metadata.block_plan import BLOCKS

TYPES = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "tokens": draw(st.integers(1, 300)),
        "hidden": draw(st.integers(1, 5)),
        "block_rows": draw(st.integers(1, 9)),
        "native": draw(st.sampled_from(sorted(TYPES))),
        "gaps": draw(st.lists(st.integers(1, 5), max_size=25)),
        "by_time": draw(st.sets(st.integers(1, 25))),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "in_place": draw(st.booleans()),
    }


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "10")), deadline=None)
@given(runs())
def test_a_run_returns_the_appended_values(run: dict[str, Any]) -> None:
    tokens, hidden, native = int(run["tokens"]), int(run["hidden"]), str(run["native"])
    rng = np.random.default_rng(run["seed"])
    width = TYPES[native]
    bits_type = np.dtype(f"u{width // 8}")
    model: list[tuple[int, np.ndarray]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        with RunWriter.create(
            path,
            token=np.arange(tokens),
            hidden=hidden,
            variables={"W": native},
            block_rows=int(run["block_rows"]),
            commit_every=None,
        ) as writer:
            step = seen = 0
            for gap in run["gaps"]:
                bits = rng.integers(0, 2**width, (tokens, hidden), dtype=bits_type)
                if run["in_place"]:
                    writer.next_row()["W"][...] = bits
                    writer.commit_row(step)
                else:
                    value = bits if width == 16 else bits.view(native)
                    writer.append(step=step, W=value)
                model.append((step, bits))
                step += gap
                if len(model) in run["by_time"]:
                    commit_now(writer)
                    seen = len(model)
                committed = xr.open_zarr(path).sizes["step"]
                assert committed >= seen
                assert len(model) - committed <= BLOCKS * writer.layout.block_rows
                assert committed == seen or committed % writer.layout.block_rows == 0
        ds = xr.open_zarr(path)
        assert ds.step.values.tolist() == [step for step, _ in model]
        read = ds.W.values
        unsigned = read.view(f"u{read.dtype.itemsize}")
        for row, (_, bits) in enumerate(model):
            if native == "bfloat16":
                expected = bits.astype("u4") << 16
            elif native == "float16":
                mask = np.isnan(bits.view("f2"))
                expected = bits.view("f2").astype("f4").view("u4")
                payload = (bits.astype("u4") & 0x3FF) << 13
                expected = np.where(mask, (bits.astype("u4") & 0x8000) << 16 | 0x7F800000 | payload,
                                    expected)  # fmt: skip
            else:
                expected = bits
            assert (unsigned[row] == expected).all()
