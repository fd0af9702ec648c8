"""Run → file → run, and files of any names, formats and masks: bit for bit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from exchange_runs import (
    FORMATS,
    MATRICES,
    WORDS,
    Truth,
    assert_same_run,
    stored,
    truth,
    write,
    write_run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import export, import_file, open_run

EXAMPLES = int(os.environ.get("TRAJSTORE_EXAMPLES", "4"))

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


pytest.importorskip("h5py")

POPULATIONS = {
    "dead_mask": lambda dead: dead,
    "untrained_mask": lambda dead: dead.astype("u1"),
    "live_mask": lambda dead: ~dead,
    "dead_ids": np.flatnonzero,
    "untrained_indices": lambda dead: np.flatnonzero(dead).astype("i4"),
    "live_token_ids": lambda dead: np.flatnonzero(~dead),
    "token_counts": lambda dead: np.where(dead, 0, 5),
}


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 16))
def test_names_types_and_masks_of_any_kind(data: st.DataObject, seed: int) -> None:
    form = data.draw(st.sampled_from(FORMATS))
    known = truth(seed=seed, stride=data.draw(st.sampled_from([1, 10])))
    arrays: dict[str, Any] = {}
    kinds = ["float32", "uint16"] if form != "safetensors" else ["float32", "uint16", "bfloat16"]
    held = {"W"} | data.draw(st.sets(st.sampled_from([*MATRICES, "logits", "loss"])))
    names = {name: data.draw(st.sampled_from(WORDS[name])) for name in sorted(held)}
    for name, key in names.items():
        kind = "float32" if name == "loss" else data.draw(st.sampled_from(kinds))
        values = known.values[name]
        # Before the first step there is nothing to save of what a step makes.
        short = name in ("grad", "loss") and data.draw(st.booleans())
        arrays[key] = stored(values, kind)[1:] if short else stored(values, kind)
    labelled = data.draw(st.booleans())
    if labelled:
        arrays[data.draw(st.sampled_from(WORDS["steps"]))] = known.steps
    reported = data.draw(st.sets(st.sampled_from(sorted(POPULATIONS)), max_size=3))
    arrays |= {key: POPULATIONS[key](known.dead) for key in reported}
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "file"), form, arrays, n_dead=int(known.dead.sum()))
        import_file(file, Path(folder, "run.zarr"))
        ds = open_run(Path(folder, "run.zarr")).load()
    _check(ds, known, names, steps=known.steps if labelled else np.arange(len(known.steps)))
    assert ("is_dead" in ds.coords) == bool(reported)
    if reported:
        assert (ds.is_dead.values == known.dead).all()


def _check(
    ds: Any,
    known: Truth,
    names: dict[str, str],
    *,
    steps: np.ndarray,
) -> None:
    assert ds.step.values.tolist() == steps.tolist()
    assert set(ds.data_vars) == set(names)
    for name in names:
        assert np.array_equal(ds[name].values, known.values[name], equal_nan=True), name
        assert ds[name].attrs["native_dtype"] == "bfloat16"
