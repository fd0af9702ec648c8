"""Exchange: run → file → run bit for bit; files of any names and masks; damaged and made-up files.

``TRAJSTORE_FUZZ=200000`` tries that many damaged files of each kind instead of a few, and
``TRAJSTORE_EXAMPLES=300`` that many made-up headers and runs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from exchange_runs import (
    ALL,
    FORMATS,
    MATRICES,
    WORDS,
    assert_same_run,
    read_all,
    stored,
    truth,
    write,
    write_run,
)
from forked_processes import processes
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trajstore import export, import_file, open_run
from trajstore.errors import TrajstoreError
from trajstore.exchange.layouts import NAMES, layout_of

TRIES = int(os.environ.get("TRAJSTORE_FUZZ", "90"))
EXAMPLES = int(os.environ.get("TRAJSTORE_EXAMPLES", "0"))
INTERESTING = [0, 1, 2, 7, 8, 255, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

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
        "variables": {
            name: draw(TYPES) for name in [draw(st.sampled_from(["W", "cells"])), *sorted(names)]
        },
        "rows": rows,
        "tokens": tokens,
        "hidden": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 1 << 16)),
        "block_rows": draw(st.integers(1, 6)),
        "ids": np.array(draw(st.permutations(range(0, 3 * tokens, 3)))),
        "steps": np.cumsum(draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))) - 1,
    }


@settings(max_examples=EXAMPLES or 4)
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


POPULATIONS = {
    "dead_mask": lambda dead: dead,
    "untrained_mask": lambda dead: dead.astype("u1"),
    "live_mask": lambda dead: ~dead,
    "dead_ids": np.flatnonzero,
    "untrained_indices": lambda dead: np.flatnonzero(dead).astype("i4"),
    "live_token_ids": lambda dead: np.flatnonzero(~dead),
    "token_counts": lambda dead: np.where(dead, 0, 5),
}


@settings(max_examples=EXAMPLES or 4)
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
    steps = known.steps if labelled else np.arange(len(known.steps))
    assert ds.step.values.tolist() == steps.tolist()
    assert set(ds.data_vars) == set(names)
    for name in names:
        assert np.array_equal(ds[name].values, known.values[name], equal_nan=True), name
        assert ds[name].attrs["native_dtype"] == "bfloat16"
    assert ("is_dead" in ds.coords) == bool(reported)
    if reported:
        assert (ds.is_dead.values == known.dead).all()


def grammar() -> dict[str, dict[str, Any]]:
    """Arrays of files of every kind: of some tokens, of several runs, untied, of one state."""
    known = truth(rows=4, tokens=6, hidden=2)
    W, g = (stored(known.values[name], "float32") for name in ("W", "grad"))
    dead, ids = known.dead, np.flatnonzero(known.dead)
    return {
        "some tokens": {"W": stored(known.values["W"], "uint16")[:, dead], "g": g[:, dead],
                        "dead_mask": dead, "dead_indices": ids},
        "prefixed": {"dead_grads": g[:, dead], "dead_deltas": W[:, dead], "dead_token_ids": ids},
        "along an axis": {"W": np.stack([W, W]), "losses": np.zeros((2, 4), "f4"), "n_runs": 2,
                          "init_scales": np.ones(2, "f4")},
        "numbered": {"run_0_W": W, "run_1_W": W, "run_0_g": g, "seed": 42},
        "untied": {"E": W, "W": W, "g_E": g, "token_counts": np.where(dead, 0, 5)},
        "one state": {"embeddings": W[0], "m": W[1], "step": 7, "loss": np.float32(2)},
        "resumed": {"W": W, "g": g[1:], "steps": np.arange(4) + 9, "starting_step": 9},
        "numbers": {"cells": np.asfortranarray(W), "betas": np.array([0.9, 0.95], "f4"),
                    "eps": np.array([1e-6]), "seeds": np.arange(3), "n_runs": np.array([1])},
    }  # fmt: skip


def samples(form: str, folder: Path) -> list[bytes]:
    """Sound files: of each layout, and of each kind that the grammar knows."""
    file, made = folder / "f", []
    write_run(folder / "run.zarr", ALL, rows=4, tokens=3, hidden=2)
    if form == "hdf5":
        export(folder / "run.zarr", file, format="hdf5")
        return [file.read_bytes()]
    for layout in sorted({*NAMES.values()}) if form == "safetensors" else ():
        described = layout_of(layout)
        if described.format == "safetensors":
            runs = [folder / "run.zarr"] * (2 if described.runs == "matrices" else 1)
            export(runs, file, layout=layout, overwrite=True)
            made.append(file.read_bytes())
    for number, arrays in enumerate(grammar().values()):
        with file.open("wb") as opened:
            if form == "safetensors":
                write(file, form, arrays, n_steps=3)
            elif form == "npy":
                order = np.asfortranarray if number % 2 else np.ascontiguousarray
                np.save(opened, order(arrays.get("W", np.zeros((4, 3, 2)))))
            elif form == "npz":
                (np.savez_compressed if number % 2 else np.savez)(opened, **arrays)
            else:
                import torch

                state = {key: torch.tensor(array) for key, array in arrays.items()}
                in_zip = bool(number % 2)
                torch.save({"a": state, "step": 3}, opened, _use_new_zipfile_serialization=in_zip)
        made.append(file.read_bytes())
    return made


def damaged(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        kind = rng.randrange(6)
        at = rng.randrange(len(made)) if made else 0
        # The header is where most can go wrong.
        at = min(at, rng.randrange(4096)) if rng.random() < 0.7 else at
        if kind == 0:
            made[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del made[at : at + rng.choice((1, 4, 64, 4096))]
        elif kind == 2:
            made[at:at] = made[at : at + rng.choice((1, 8, 100))]
        elif kind == 3:
            made[0:8] = rng.choice(INTERESTING).to_bytes(8, "little")
        elif kind == 4:
            digits = [i for i in range(8, min(len(made), 4096)) if 48 <= made[i] < 58]
            if digits:
                at = rng.choice(digits)
                made[at : at + 1] = str(rng.choice(INTERESTING)).encode()
        else:
            del made[at:]
    return bytes(made)


def read_damaged(good: list[bytes], path: Path, tries: int, signature: int, memory: int) -> int:
    """How many damaged files are accepted; none of them makes Python allocate much."""
    rng, accepted = random.Random(7), 0
    tracemalloc.start()
    try:
        for number in range(tries):
            whole = good[number % len(good)]
            data = whole[:signature] + damaged(whole, rng)[signature:]
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read_all(path)
                accepted += 1
            except TrajstoreError:
                pass
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < memory + 30 * len(data), f"try {number}: {used} bytes for {len(data)}"
    finally:
        tracemalloc.stop()
    return accepted


@pytest.mark.parametrize(
    ("form", "part", "signature", "memory"),
    [  # Damage to the values themselves cannot be seen; damage to the header must be.
        ("safetensors", 1, 0, 300_000),
        ("npz", 3, 4, 8_000_000),  # a deflated byte stands for a thousand
        ("npy", 3, 4, 8_000_000),
    ],
)
def test_damaged_files_are_errors_and_take_little_memory(
    tmp_path: Path, form: str, part: int, signature: int, memory: int
) -> None:
    """A crash leaves the damaged file in its folder."""
    good, path = samples(form, tmp_path), tmp_path / "W"  # the name of an array that has none
    accepted = read_damaged(good, path, TRIES // part, signature, memory)
    assert 0 < accepted < TRIES / part * (1 / 2 if form == "safetensors" else 3 / 4)


def peak() -> int:
    """The most memory that this process has had, in KiB, also what libraries in C have taken."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def read_and_measured(*arguments: Any) -> tuple[int, int]:
    """What `read_damaged` returns, and by how much the peak has grown; in a process."""
    before = peak()
    return read_damaged(*arguments), peak() - before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "signature"), [("hdf5", 8), pytest.param("torch", 2, marks=pytest.mark.torch)]
)
def test_damaged_files_of_libraries_in_c_are_errors_and_take_little_memory(
    tmp_path: Path, form: str, signature: int
) -> None:
    """In a process, which a crash ends; it leaves the damaged file in its folder."""
    good, tries = samples(form, tmp_path), TRIES // 3
    with ProcessPoolExecutor(1, processes) as pool:
        reading = pool.submit(read_and_measured, good, tmp_path / "W", tries, signature, 8_000_000)
        accepted, grown = reading.result()
    assert 0 < accepted < tries * 3 / 4
    assert grown < 1 << 18


def import_or_refuse(folder: str) -> None:
    """Import a file: the run can be read, or it was refused and nothing is left."""
    try:
        import_file(Path(folder, "f"), Path(folder, "run.zarr"))
    except TrajstoreError:
        assert os.listdir(folder) == ["f"]
    else:
        open_run(Path(folder, "run.zarr")).load()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [*"W E grads step token embeddings recorded_steps deltas dead_mask live_ids dead_W".split(),
     *"run_0_W run_1_W learning_rates n_dead token_counts dW centroid".split(),
     "__metadata__", "é"]
)  # fmt: skip


@settings(max_examples=EXAMPLES or 12)
@given(
    header=st.dictionaries(
        KEYS,
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["BF16", "F32", "I64", "BOOL", "U8", "X"]),
                "shape": st.lists(st.integers(0, 4), max_size=4) | JSON,
                "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | JSON,
            }
        )
        | JSON,
    ),
    data=st.binary(max_size=64),
    attributes=JSON,
)
def test_made_up_headers(header: dict[str, Any], data: bytes, attributes: Any) -> None:
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"] = {"format": "trajstore", "attributes": json.dumps(attributes)}
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "f").write_bytes(len(text).to_bytes(8, "little") + text + data)
        import_or_refuse(folder)


@settings(max_examples=EXAMPLES or 12)
@given(attributes=JSON, texts=JSON)
def test_made_up_metadata_of_a_sound_file(attributes: Any, texts: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        attributes = {"config": attributes, "optimizer": {}, "created": "x"}
        save_file(
            {"W": np.zeros((2, 2, 1), "f4"), "step": np.arange(2), "token": np.arange(2)},
            Path(folder, "f"),
            metadata={
                "format": "trajstore",
                "attributes": json.dumps(attributes),
                "token_text": json.dumps(texts),
            },
        )
        import_or_refuse(folder)
