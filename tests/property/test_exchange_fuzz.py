"""Importers against damaged and made-up files: an error or a run, never anything else.

``TRAJSTORE_FUZZ=200000`` tries that many damaged files of each kind instead of a few, and
``TRAJSTORE_EXAMPLES=300`` that many made-up headers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_runs import ALL, read_all, stored, truth, write, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

import trajstore
from trajstore.errors import TrajstoreError
from trajstore.exchange.layouts import NAMES, layout_of

TRIES = int(os.environ.get("TRAJSTORE_FUZZ", "90"))
EXAMPLES = int(os.environ.get("TRAJSTORE_EXAMPLES", "12"))
INTERESTING = [0, 1, 2, 7, 8, 255, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def samples(folder: Path) -> list[bytes]:
    """A sound file of each layout, and of each kind that the grammar knows."""
    write_run(folder / "run.zarr", ALL, rows=4, tokens=3, hidden=2)
    made = []
    for layout in sorted({*NAMES.values()}):
        described = layout_of(layout)
        if described.format == "safetensors":
            runs = [folder / "run.zarr"]
            if described.runs == "matrices":
                runs *= 2
            trajstore.export(runs, folder / "f", layout=layout, overwrite=True)
            made.append((folder / "f").read_bytes())
    for arrays in grammar().values():
        made.append(write(folder / "f", "safetensors", arrays, n_steps=3).read_bytes())
    return made


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


def accepted(files: Iterable[tuple[bytes, int]], path: Path) -> int:
    """How many of the files are read. Each has a limit of the bytes that reading it may take."""
    found = 0
    tracemalloc.start()
    try:
        for number, (data, most) in enumerate(files):
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read_all(path)
                found += 1
            except TrajstoreError:
                pass
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < most, f"try {number}: {used} bytes for {len(data)}"
    finally:
        tracemalloc.stop()
    return found


def test_damaged_safetensors_are_errors(tmp_path: Path) -> None:
    good, rng = samples(tmp_path), random.Random(7)
    tries = [damaged(good[number % len(good)], rng) for number in range(TRIES)]
    limited = ((data, 300_000 + 30 * len(data)) for data in tries)
    # Damage to the values themselves cannot be seen; damage to the header must be.
    assert 0 < accepted(limited, tmp_path / "fuzz") < TRIES / 2


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_damaged_files_of_numpy_are_errors(tmp_path: Path, form: str) -> None:
    good, rng = [], random.Random(5)
    for number, arrays in enumerate(grammar().values()):
        file = tmp_path / "f"
        if form == "npy":
            with file.open("wb") as opened:
                order = np.asfortranarray if number % 2 else np.ascontiguousarray
                np.save(opened, order(arrays.get("W", np.zeros((4, 3, 2)))))
        elif number % 2:
            write(file, "npz", arrays)
        else:
            with file.open("wb") as opened:
                np.savez(opened, **arrays)
        good.append(file.read_bytes())
    tries = (damaged(good[number % len(good)], rng) for number in range(TRIES // 3 + 1))
    # A deflated byte stands for a thousand.
    limited = ((good[0][:4] + data[4:], 8_000_000) for data in tries)
    assert accepted(limited, tmp_path / "fuzz") < TRIES / 4


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


@settings(max_examples=EXAMPLES, deadline=None)
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
        path = Path(folder, "f")
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        try:
            trajstore.import_file(path, Path(folder, "run.zarr"))
        except TrajstoreError:
            assert os.listdir(folder) == ["f"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(attributes=JSON, texts=JSON)
def test_made_up_metadata_of_a_sound_file(attributes: Any, texts: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

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
        try:
            trajstore.import_file(Path(folder, "f"), Path(folder, "run.zarr"))
        except TrajstoreError:
            assert os.listdir(folder) == ["f"]
        else:
            trajstore.open_run(Path(folder, "run.zarr")).load()


FUZZ = """
import random, resource, sys
from pathlib import Path
from exchange_runs import read_all
from trajstore.errors import TrajstoreError

good, path, most = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[5])
first, last = map(int, sys.argv[3:5])
resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
accepted = 0
for number in range(first, last):
    rng = random.Random(number)
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(8, len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randrange(8, len(data)):]
    path.write_bytes(data)
    print(number, flush=True)
    try:
        read_all(path)
        accepted += 1
    except TrajstoreError:
        pass
# Not getrusage: its maximum is inherited from the process that started this one.
if sys.platform == "linux":
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0])
    assert peak < most, f"{peak} KiB"
print("accepted", accepted)
"""


def fuzzed(good: Path, tries: int, most: int = 1 << 20) -> int:
    """How many of the damaged files were accepted, in a process that a crash would end."""
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, good, good.with_name("fuzz"), "0", str(tries), str(most)],
        capture_output=True,
        text=True,
        timeout=3000,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    *_, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"exit {done.returncode} at {last}: {done.stderr[-2000:]}"
    return int(last.split()[1])


@pytest.mark.nightly
def test_damaged_hdf5_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    write_run(tmp_path / "run.zarr", ALL, rows=4, tokens=3, hidden=2)
    trajstore.export(tmp_path / "run.zarr", tmp_path / "f.h5", format="hdf5")
    tries = max(TRIES // 3, 1)
    assert 0 < fuzzed(tmp_path / "f.h5", tries) < tries


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("in_zip", [True, False])
def test_damaged_files_of_torch_are_errors(tmp_path: Path, in_zip: bool) -> None:
    torch = pytest.importorskip("torch")
    arrays = grammar()["resumed"]
    content = {"state": {key: torch.tensor(array) for key, array in arrays.items()}, "step": 3}
    torch.save(content, tmp_path / "f.pt", _use_new_zipfile_serialization=in_zip)
    tries = max(TRIES // 10, 1)
    assert fuzzed(tmp_path / "f.pt", tries, most=2 << 20) < tries
