"""Exports with the keys, types and ranks of a file that exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_runs import write_run
from safetensors.numpy import load_file, save_file

import trajstore
from trajstore.errors import FormatError, InvalidArgument
from trajstore.exchange.layouts import LAYOUTS

SHARED = next((p / "shared/data" for p in Path(__file__).parents if (p / "shared/data").exists()),
              Path("shared/data"))  # fmt: skip
ROWS, TOKENS, HIDDEN = 6, 7, 3
TYPES = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "float32",
    "exp_avg_sq": "float32",
    "logits": "float32",
    "loss": "float32",
    "hidden_mean": "float32",
}
CONFIG = {
    "model": {"vocab_size": TOKENS, "hidden": HIDDEN, "layers": 2, "heads": 1},
    "training": {"steps": 5, "batch_size": 32, "seed": 42},
    "initialization": {"kind": "point", "sigma": 1e-5},
}
RULE = {"lr": 1e-3, "initial_lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in their values."""
    paths = [tmp_path_factory.mktemp("runs") / name for name in ("a.zarr", "b.zarr")]
    for seed, path in enumerate(paths):
        write_run(
            path, TYPES, rows=ROWS, tokens=TOKENS, hidden=HIDDEN, seed=seed, config=CONFIG,
            attributes={"optimizer": {"hyperparameters": RULE}},
        )  # fmt: skip
    return paths


def assert_alike(one: Path, other: Path, *, besides: tuple[str, ...] = ()) -> None:
    """Two files have the same keys, types and ranks."""
    first, second = load_file(one), load_file(other)
    kinds = [
        {key: (str(array.dtype), array.ndim) for key, array in file.items() if key not in besides}
        for file in (first, second)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "layout", [name for name, one in LAYOUTS.items() if one.format == "safetensors"]
)
def test_a_file_of_a_named_layout(runs: list[Path], tmp_path: Path, layout: str) -> None:
    given: Any = runs if LAYOUTS[layout].runs else runs[0]
    trajstore.export(given, tmp_path / "f", layout=layout)
    done = trajstore.export(given, tmp_path / "g", like=tmp_path / "f")
    first, second = load_file(tmp_path / "f"), load_file(tmp_path / "g")
    assert first.keys() == second.keys()
    for key, array in first.items():
        assert (second[key].dtype, second[key].shape) == (array.dtype, array.shape), key
        assert second[key].tobytes() == array.tobytes(), key
    # These two have a key that the file lacks: base_seed.
    assert done.layout == ("f" if layout in ("flannel-3", "flannel-5") else layout)


def own_file(path: Path) -> None:
    """A file of nobody's layout: rows of dead tokens, types of its own, unknown keys."""
    dead = np.array([1, 0, 0, 1, 0, 0, 1], np.uint8)
    shape = (4, 3, HIDDEN)
    save_file(
        {
            "steps": np.arange(4, dtype=np.int32),
            "W_history": np.ones(shape, ml_dtypes.bfloat16).view(np.uint16),
            "grads": np.ones((3, *shape[1:]), np.float16),
            "delta_W_prime": np.ones((3, *shape[1:]), np.float32),
            "train_loss": np.full(4, np.nan, np.float64),
            "logits": np.zeros((4, 7), np.float32),
            "dead_token_mask": dead,
            "dead_tokens": np.flatnonzero(dead).astype(np.int32),
            "lr": np.array(0.5, np.float64),
            "n_dead": np.array(3, np.int32),
            "seed": np.array(0.5, np.float32),
            "entropy": np.zeros(4, np.float32),
            "loss_of_others": np.zeros((4, 2), np.float32),
            "deltas": np.zeros(shape, np.float16),
        },
        path,
    )


def test_a_file_of_no_layout(runs: list[Path], tmp_path: Path) -> None:
    own_file(tmp_path / "f.safetensors")
    done = trajstore.export(runs[0], tmp_path / "g", like=tmp_path / "f.safetensors")
    (note,) = [note for note in done.notes if "a run has nothing" in note]
    unknown = ("deltas", "entropy", "loss_of_others", "seed")
    assert sorted(note.partition(" omitted")[0].split(", ")) == sorted(unknown)
    assert_alike(tmp_path / "f.safetensors", tmp_path / "g", besides=unknown)
    file, ds = load_file(tmp_path / "g"), trajstore.open_run(runs[0]).load()
    dead = ds.is_dead.values
    assert (file["W_history"].view(ml_dtypes.bfloat16).astype("f4") == ds.W.values[:, dead]).all()
    assert (file["grads"] == ds.grad.values[1:, dead].astype("f2")).all()
    assert np.isnan(file["train_loss"][0])
    assert (file["logits"][0] == 0).all()
    assert (file["logits"][1:] == ds.logits.values[1:]).all()
    assert file["lr"] == 1e-3  # not rounded to float32
    assert file["dead_token_mask"].tolist() == dead.tolist()
    assert file["dead_tokens"].tolist() == np.flatnonzero(dead).tolist()


def test_a_file_that_a_run_cannot_imitate(runs: list[Path], tmp_path: Path) -> None:
    save_file({"embeddings": np.ones((7, 3), "f4"), "x": np.ones(2, "f4")}, tmp_path / "f")
    with pytest.raises(InvalidArgument, match=r"no history .* it holds embeddings, x; describe it"):
        trajstore.export(runs[0], tmp_path / "g", like=tmp_path / "f")
    with pytest.raises(InvalidArgument, match=r"got layout 15\.1a and a file .*; give one"):
        trajstore.export(runs[0], tmp_path / "g", like=tmp_path / "f", layout="15.1a")
    (tmp_path / "text").write_text("a text")
    with pytest.raises(FormatError, match="not a valid safetensors file"):
        trajstore.export(runs[0], tmp_path / "g", like=tmp_path / "text")
    assert not (tmp_path / "g").exists()


@pytest.mark.torch
@pytest.mark.skipif(not (SHARED / "their_files.py").exists(), reason="the script is not here")
def test_files_of_the_notebooks_come_back_alike(tmp_path: Path) -> None:
    """Imported, and exported like the file itself."""
    script = str(SHARED / "their_files.py")
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, capture_output=True)
    files = json.loads((tmp_path / "files.json").read_text())
    # The imported run does not hold these: sizes of unlabeled populations, derived arrays.
    lost = ("n_dead", "n_live", "n_trained", "n_untrained", "bh_center", "centroid",
            "last_motion_step", "starting_step")  # fmt: skip
    layouts = {}
    for name, file in files.items():
        if not file.endswith(".safetensors") or name.startswith("mask") or "08.3a" in name:
            continue
        before = {"layout": "1.12a"} if "git" in name else {}
        done = trajstore.import_file(tmp_path / file, tmp_path / f"{name}.zarr", **before)
        given = [one.path for one in (done, *done.others)]
        made = trajstore.export(given, tmp_path / f"{name}.out", like=tmp_path / file)
        layouts[name] = made.layout
        assert_alike(tmp_path / file, tmp_path / f"{name}.out", besides=lost)
    assert layouts["b2_1.9d_sgd_f32"] == "15.1a"
    assert layouts["b2_13.1b_bf16"] == "13.1b"
    assert layouts["b3_thimble4_5"] == "thimble-4"
    assert len(layouts) == 22
