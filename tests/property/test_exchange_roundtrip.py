"""Run → file → run, bit for bit, for every format, type and selection."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import xarray as xr
from exchange_runs import assert_same_run, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import export, import_file, open_run

EXAMPLES = int(os.environ.get("TRAJSTORE_EXAMPLES", "5"))

FORMS = ("safetensors", "hdf5", "zarr", "run")
TYPES = st.sampled_from(["bfloat16", "float16", "float32", "float64"])


@st.composite
def runs(draw: st.DrawFn) -> dict:
    names = draw(
        st.sets(st.sampled_from(["grad", "exp_avg", "exp_avg_sq", "logits", "loss", "lr"]))
    )
    rows = draw(st.integers(1, 13))
    tokens = draw(st.integers(1, 9))
    return {
        "variables": {name: draw(TYPES) for name in ["W", *sorted(names)]},
        "rows": rows,
        "tokens": tokens,
        "hidden": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 1 << 16)),
        "block_rows": draw(st.integers(1, 6)),
        "ids": np.array(draw(st.permutations(range(0, 3 * tokens, 3)))),
        "steps": np.cumsum(draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))) - 1,
    }


@settings(max_examples=EXAMPLES, deadline=None)
@given(run=runs(), form=st.sampled_from(FORMS), data=st.data(), lazy=st.booleans())
def test_a_selection_comes_back_bit_for_bit(
    run: dict, form: str, data: st.DataObject, lazy: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, file, back = (Path(folder) / name for name in ("run.zarr", "file", "back.zarr"))
        write_run(path, any_bits=True, **run)
        whole = xr.open_zarr(path).load()
        rows = sorted(data.draw(st.sets(st.integers(0, run["rows"] - 1), min_size=1)))
        at = sorted(data.draw(st.sets(st.integers(0, run["tokens"] - 1), min_size=1)))
        expected = whole.isel(step=rows, token=at)
        export(
            open_run(path) if lazy else path,
            file if form in ("safetensors", "hdf5") else back,
            format=form,
            steps=[int(step) for step in expected.step],
            tokens=expected.token.values,
        )
        if form in ("safetensors", "hdf5"):
            done = import_file(file, back)
            assert done.rows == len(rows)
            assert done.layout == ("native" if form == "safetensors" else "hdf5")
        assert_same_run(expected, back)
