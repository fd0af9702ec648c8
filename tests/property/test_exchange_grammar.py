"""Any combination of names, formats and forms of masks imports, bit for bit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_files import FORMATS, MATRICES, WORDS, Truth, stored, truth, write
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import import_file, open_run

pytest.importorskip("h5py")

EXAMPLES = int(os.environ.get("TRAJSTORE_EXAMPLES", "12"))
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


@settings(max_examples=EXAMPLES // 2 + 1, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    runs=st.integers(1, 3),
    along=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_several_runs_in_a_file(form: str, runs: int, along: bool, seed: int) -> None:
    known = [truth(seed=seed + number) for number in range(runs)]
    arrays: dict[str, Any] = {"dead_mask": known[0].dead, "n_runs": runs}
    for name in ("W", "loss"):
        each = [stored(one.values[name], "float32") for one in known]
        if along:
            arrays[name] = np.stack(each)
        else:
            arrays |= {f"run_{number}_{name}": array for number, array in enumerate(each)}
    arrays["learning_rates"] = np.arange(1, runs + 1, dtype="f4")
    with tempfile.TemporaryDirectory() as folder:
        done = import_file(write(Path(folder, "file"), form, arrays), Path(folder, "run.zarr"))
        all_done = (done, *done.others)
        assert [one.path.name for one in all_done] == [f"run.{n}.zarr" for n in range(runs)]
        for number, one in enumerate(all_done):
            ds = open_run(one.path).load()
            names = {"W": "W", "loss": "loss"}
            _check(ds, known[number], names, dead=known[0].dead)
            assert ds.attrs["optimizer"]["hyperparameters"]["initial_lr"] == number + 1


@settings(max_examples=EXAMPLES // 2 + 1, deadline=None)
@given(
    form=st.sampled_from(FORMATS),
    prefix=st.booleans(),
    both=st.booleans(),
    mask=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_rows_of_some_tokens_keep_their_ids(
    form: str, prefix: bool, both: bool, mask: bool, seed: int
) -> None:
    known = truth(seed=seed)
    dead, live = np.flatnonzero(known.dead), np.flatnonzero(~known.dead)
    names = {"W": "W", "grad": "g"}
    arrays: dict[str, Any] = {"dead_indices": dead, "live_indices": live}
    mask = mask or not prefix
    if mask:
        arrays["dead_mask"] = known.dead
    both = both and prefix
    for name, key in names.items():
        for population, ids in (("dead", dead), ("live", live)):
            if population == "dead" or both:
                array = stored(known.values[name], "float32")[:, ids]
                arrays[f"{population}_{key}" if prefix else key] = array
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "file"), form, arrays)
        # Names without a prefix do not say which rows they have.
        import_file(
            file, Path(folder, "run.zarr"), map=None if prefix else {"token": "dead_indices"}
        )
        ds = open_run(Path(folder, "run.zarr")).load()
    ids = np.arange(len(known.dead)) if both else dead
    assert ds.token.values.tolist() == ids.tolist()
    for name in names:
        expected = known.values[name][:, ids]
        assert np.array_equal(ds[name].values, expected, equal_nan=True)
    assert (ds.is_dead.values == known.dead[ids]).all()


def _check(
    ds: Any,
    known: Truth,
    names: dict[str, str],
    *,
    steps: np.ndarray | None = None,
    dead: np.ndarray | None = None,
) -> None:
    assert ds.step.values.tolist() == (known.steps if steps is None else steps).tolist()
    assert set(ds.data_vars) == set(names)
    for name in names:
        assert np.array_equal(ds[name].values, known.values[name], equal_nan=True), name
        assert ds[name].attrs["native_dtype"] == "bfloat16"
    if dead is not None:
        assert (ds.is_dead.values == dead).all()
