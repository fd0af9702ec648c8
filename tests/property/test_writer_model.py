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
from trajstore.values.native_types import NATIVE_TYPES, widen


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "tokens": draw(st.integers(1, 300)),
        "hidden": draw(st.integers(1, 5)),
        "block_rows": draw(st.integers(1, 9)),
        "native": draw(st.sampled_from(sorted(NATIVE_TYPES))),
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
    bits_type = NATIVE_TYPES[native].bits
    width = 8 * bits_type.itemsize
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
        expected = np.array([bits for _, bits in model], bits_type).reshape(-1, tokens, hidden)
        assert ds.W.values.tobytes() == widen(expected, NATIVE_TYPES[native]).tobytes()
