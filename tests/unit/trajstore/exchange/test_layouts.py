"""What the notebooks' files hold, row by row, against a run that is known."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_runs import ALL, assert_same_run, write_run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import trajstore
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange import layouts
from trajstore.exchange.layouts import LAYOUTS, MARKS, MASKS, NAMES, as_toml, layout_of
from trajstore.exchange.usual_names import named

CONFIG = {
    "model": {"vocab_size": 7, "hidden": 3, "layers": 2, "heads": 1},
    "training": {"steps": 10, "batch_size": 32},
    "initialization": {"kind": "point", "sigma": 1e-5},
}
OPTIMIZER = {
    "hyperparameters": {"lr": 0.0, "initial_lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}
}
ROWS, TOKENS = 11, 7
DEAD = [0, 3, 6]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    bits = write_run(
        path,
        ALL,
        rows=ROWS,
        tokens=TOKENS,
        hidden=3,
        config=CONFIG,
        attributes={"optimizer": OPTIMIZER},
    )
    values = {
        name: array.view(ml_dtypes.bfloat16 if ALL[name] == "bfloat16" else "f4")
        for name, array in bits.items()
    }
    return path, values


def f4(array: np.ndarray) -> np.ndarray:
    return array.astype("f4")


def test_15_1a(run: Any, tmp_path: Path) -> None:
    path, values = run
    done = trajstore.export(path, tmp_path / "f", layout="15.1a")
    file = load_file(tmp_path / "f")
    assert done.notes == ("token_count, token_text omitted: not part of layout 15.1a",)
    assert file["recorded_steps"].tolist() == list(range(ROWS))
    assert file["recorded_steps"].dtype == np.int64
    assert file["dead_token_ids"].tolist() == DEAD
    assert file["live_token_ids"].tolist() == [1, 2, 4, 5]
    names = {"embeddings": "W", "grads": "grad", "momentum": "exp_avg", "variance": "exp_avg_sq"}
    for key, name in (names | {"logits": "logits"}).items():
        assert file[key].dtype == np.float32
        assert (file[key][1:] == f4(values[name])[1:]).all()
    assert (file["embeddings"][0] == f4(values["W"])[0]).all()
    for key in ("grads", "momentum", "variance", "logits"):
        assert (file[key][0] == 0).all()
    assert np.isnan(file["losses"][0])
    assert (file["losses"][1:] == values["loss"][1:]).all()
    scalars = {"init_sigma": 1e-5, "learning_rate": 1e-3, "weight_decay": 0.01}
    for key, value in (scalars | {"adam_beta1": 0.9, "adam_beta2": 0.999}).items():
        assert file[key].shape == ()
        assert file[key] == np.float32(value)
    assert file["init_method_code"].dtype == np.int32
    assert file["init_method_code"] == 0


def test_14_1a(run: Any, tmp_path: Path) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout="14.1a")
    file = load_file(tmp_path / "f")
    W = f4(values["W"])
    assert file["deltas"].dtype == np.float32
    assert (file["deltas"][0] == 0).all()
    assert (file["deltas"][1:] == W[1:] - W[:-1]).all()
    assert (file["grads"][0] == 0).all()
    assert (file["grads"][1:] == f4(values["grad"])[1:]).all()
    done = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert done.layout == "14.1a"
    assert set(done.variables) == {"grad", "delta"}
    assert any("no W" in note for note in done.notes)


def test_1_12a_is_shifted_out_and_back(run: Any, tmp_path: Path) -> None:
    path, values = run
    done = trajstore.export(path, tmp_path / "f", layout="1.12a")
    file = load_file(tmp_path / "f")
    assert set(file) == {"W", "grads", "momentum", "variance", "logits", "loss"}
    dtypes = {"W": ml_dtypes.bfloat16, "grads": ml_dtypes.bfloat16}
    for key, array in file.items():
        assert array.dtype == dtypes.get(key, np.float32)
        assert len(array) == ROWS
    for key, name in {"W": "W", "momentum": "exp_avg", "variance": "exp_avg_sq"}.items():
        assert (f4(file[key])[1:] == f4(values[name])[:-1]).all()
        assert (f4(file[key])[0] == f4(values[name])[0]).all()
    assert (file["momentum"][:2] == 0).all()
    assert (f4(file["grads"])[0] == 0).all()
    assert file["grads"][1:].tobytes() == values["grad"][1:].tobytes()
    assert file["loss"][0] == 0
    assert (file["loss"][1:] == values["loss"][1:]).all()
    assert np.isnan(file["logits"][0]).all()
    assert any("does not hold those after step 10" in note for note in done.notes)
    with safe_open(tmp_path / "f", "numpy") as opened:
        metadata = opened.metadata()
    expected = {
        "model": "GPT2", "vocab_size": "7", "hidden_dim": "3", "n_layers": "2", "n_heads": "1",
        "n_steps": "10", "batch_size": "32", "learning_rate": "0.001",
        "final_loss": str(float(values["loss"][-1])),
    }  # fmt: skip
    assert expected.items() <= metadata.items()

    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert any("NaN in the run" in note for note in back.notes)
    ds = trajstore.open_run(tmp_path / "back.zarr").load()
    for name in ("W", "exp_avg", "exp_avg_sq"):
        assert (ds[name].values[:-1] == f4(values[name])[:-1]).all()
        assert np.isnan(ds[name].values[-1]).all()
    besides = ("W", "exp_avg", "exp_avg_sq", "token_count", "token_text", "is_dead")
    assert_same_run(path, tmp_path / "back.zarr", besides=besides)
    trajstore.export(tmp_path / "back.zarr", tmp_path / "again", layout="1.12a")
    again = load_file(tmp_path / "again")
    assert all(again[key].tobytes() == file[key].tobytes() for key in file)


@pytest.mark.parametrize("layout", ["14.1a", "1.12a"])
def test_selected_rows_keep_what_was_before_them(run: Any, tmp_path: Path, layout: str) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout=layout, steps="3,7:10")
    file = load_file(tmp_path / "f")
    W, at = f4(values["W"]), np.array([3, 7, 8, 9])
    assert file["recorded_steps"].tolist() == at.tolist()
    if layout == "14.1a":
        assert (file["deltas"] == W[at] - W[at - 1]).all()
    else:
        assert (f4(file["W"]) == W[at - 1]).all()


def test_selected_tokens_are_listed_by_place(run: Any, tmp_path: Path) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout="15.1a", tokens=[1, 3, 4, 6])
    file = load_file(tmp_path / "f")
    assert file["dead_token_ids"].tolist() == [1, 3]
    assert file["live_token_ids"].tolist() == [0, 2]
    assert file["token"].tolist() == [1, 3, 4, 6]
    assert (file["embeddings"] == f4(values["W"])[:, [1, 3, 4, 6]]).all()
    trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    back = trajstore.open_run(tmp_path / "back.zarr")
    assert back.token.values.tolist() == [1, 3, 4, 6]
    assert back.is_dead.values.tolist() == [False, True, False, True]


def test_a_row_that_is_not_there_is_not_made_up(tmp_path: Path) -> None:
    write_run(
        tmp_path / "run.zarr", ALL, rows=4, tokens=3, hidden=2, steps=np.array([0, 10, 20, 30])
    )
    with pytest.raises(InvalidArgument, match=r"layout 1\.12a needs W of step 9, which the run"):
        trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12a")
    assert not (tmp_path / "f").exists()


def test_what_a_run_or_a_layout_lacks_is_reported(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    types = {"W": "bfloat16", "loss": "float32", "lr": "float64"}
    with trajstore.RunWriter.create(path, token=[0, 1], hidden=2, variables=types) as writer:
        for step in range(3):
            loss = np.float32(step or np.nan)
            writer.append(step, W=np.full((2, 2), step, "f4"), loss=loss, lr=0.5)
    done = trajstore.export(path, tmp_path / "f", layout="1.12f")
    assert set(load_file(tmp_path / "f")) == {"recorded_steps", "embeddings", "losses"}
    assert done.variables == ("W", "loss")
    assert set(done.notes) == {
        "grads, momentum, variance, logits omitted: the run does not record grad, exp_avg, "
        "exp_avg_sq, logits",
        "lr omitted: not part of layout 1.12f",
        "n_trained, n_untrained omitted: the run does not record which tokens are dead",
        "init_scale, learning_rate, weight_decay, adam_beta1, adam_beta2 omitted: not in the run's "
        "attributes",
    }
    with pytest.raises(VariableNotRecorded, match="has rows of dead tokens"):
        trajstore.export(path, tmp_path / "g", layout="thimble-8")
    with pytest.raises(VariableNotRecorded, match="but the selection has loss"):
        trajstore.export(path, tmp_path / "g", layout="14.1a", variables="loss")
    done = trajstore.export(run[0], tmp_path / "g", layout="08.2a")
    left = "grad, exp_avg, exp_avg_sq, logits, loss, is_dead, token_count, token_text omitted: not"
    assert f"{left} part of layout 08.2a" in done.notes
    done = trajstore.export(run[0], tmp_path / "h", layout="14.1a", variables="grad")
    assert "deltas omitted: not selected" in done.notes
    with trajstore.RunWriter.create(
        tmp_path / "b.zarr", token=[0, 1], hidden=1, variables={"W": "float32"}, is_dead=[0, 1]
    ):
        pass
    done = trajstore.export(tmp_path / "b.zarr", tmp_path / "i", layout="token-counts")
    assert done.notes == ("token_occurrence_counts omitted: the run has no counts",)


def test_float32_weights_are_rounded_only_audibly(tmp_path: Path) -> None:
    bits = write_run(
        tmp_path / "run.zarr", dict.fromkeys(ALL, "float32"), rows=5, tokens=3, hidden=2
    )
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12f")
    W = bits["W"].view("f4")
    expected = W.astype(ml_dtypes.bfloat16)
    assert (load_file(tmp_path / "f")["embeddings"] == expected).all()
    file = load_file(tmp_path / "f")
    assert file["losses"].dtype == ml_dtypes.bfloat16
    assert np.isnan(f4(file["losses"])[0])
    assert (file["n_trained"], file["n_untrained"]) == (2, 1)
    changed = np.count_nonzero(expected.astype("f4") != W)
    assert any(note.startswith(f"{changed} values of embeddings") for note in done.notes)


def test_a_cell_that_reads_dead_tokens_and_sizes_from_hdf5(run: Any, tmp_path: Path) -> None:
    """In the form of the notebooks' cells: masks, ids and attributes, then W of dead tokens."""
    h5py = pytest.importorskip("h5py")
    path, values = run
    W = f4(values["W"])
    for layout in ("native", "thimble-6", "thimble-7"):
        trajstore.export(path, tmp_path / layout, layout=layout, format="hdf5")
        with h5py.File(tmp_path / layout, "r") as f:
            steps, vocabulary = f.attrs["num_steps"], f.attrs["vocab_size"]
            dead_mask, dead_ids = f["dead_mask"][:], f["dead_ids"][:]
            live_mask, live_ids = f["live_mask"][:], f["live_ids"][:]
            raw = f["W"][:]
            losses = f["losses"][:]
            if layout == "native":
                assert (f["W"].attrs["native_dtype"], f["W"].chunks[0]) == (b"bfloat16", 1)
                assert f["recorded_steps"][:].tolist() == [*range(ROWS)]
                assert {"grad_W", "momentum_W", "variance_W"} <= f.keys()
            numbers = {key: f.attrs[key] for key in ("n_dead", "n_live", "seed", "learning_rate")
                       if key in f.attrs}  # fmt: skip
        assert (steps, vocabulary) == (ROWS - 1, TOKENS)
        assert dead_mask.dtype == bool
        assert np.flatnonzero(dead_mask).tolist() == dead_ids.tolist() == DEAD
        assert (live_mask == ~dead_mask).all()
        assert len(live_ids) == numbers["n_live"] == TOKENS - numbers["n_dead"]
        assert numbers["learning_rate"] == 1e-3
        if layout == "thimble-6":
            assert raw.dtype == np.float16
            seen = raw.astype("f4")
            assert (seen == W.astype("f2").astype("f4")).all()
        else:
            assert raw.dtype == np.uint16
            seen = (raw.astype("u4") << 16).view("f4")
            assert (seen == W).all()
        assert (seen[:, dead_mask] == seen[:, dead_ids]).all()
        assert np.isnan(losses[0])
        assert (losses[1:] == values["loss"][1:]).all()
    with h5py.File(tmp_path / "thimble-6") as f:
        assert (f["W"].chunks, f["W"].compression) == ((1, TOKENS, 3), "gzip")
        assert set(f.attrs) >= {"vocab_size", "hidden_dim", "n_layers", "n_heads", "num_steps",
                                "batch_size", "adam_beta1", "init_scale"}  # fmt: skip
    with h5py.File(tmp_path / "thimble-7") as f:
        assert (f["W"].chunks, f["W"].compression) == ((ROWS, TOKENS, 3), None)
    back = trajstore.import_file(tmp_path / "thimble-7", tmp_path / "back.zarr")
    assert back.layout == "thimble-7"
    besides = ("token_count", "token_text", "logits")
    assert_same_run(path, tmp_path / "back.zarr", besides=besides)


def test_compressed_rows_are_equal_under_every_budget(run: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, values = run
    own = tmp_path / "own.toml"
    own.write_text(
        'like = "crucible-2-all"\nformat = "hdf5"\ngzip = 1\nchunk_rows = 3\n[arrays]\n'
        'centroid = {variable = "W", time = "centroid"}\n'
        'first = {variable = "W", time = "initial", type = "bfloat16", bits = true}\n'
    )
    files = []
    for memory in ("320MiB", 600):  # rows of 84 bytes in chunks of 3, in blocks of 4
        trajstore.export(path, tmp_path / "f", layout=str(own), memory=memory, overwrite=True)
        files.append((tmp_path / "f").read_bytes())
    assert files[0] == files[1]
    with h5py.File(tmp_path / "f") as f:
        assert (f["W"][:] == values["W"].view("u2")).all()
        assert (f["g"][:] == f4(values["grad"])[1:]).all()
        assert (f["first"][:] == values["W"].view("u2")[0]).all()
        np.testing.assert_allclose(f["centroid"][:], f4(values["W"]).mean(1), rtol=1e-5)
        assert f["W"].chunks == (3, TOKENS, 3)
        rows = np.ascontiguousarray(values["W"][3:6]).tobytes()
        assert f["W"].id.read_direct_chunk((3, 0, 0))[1] == zlib.compress(rows, 1)
    with pytest.raises(InvalidArgument, match=r"120 B does not hold a chunk of W, 126 B; raise it"):
        trajstore.export(path, tmp_path / "g", layout=str(own), memory=120)
    assert not (tmp_path / "g").exists()


def test_thimble_8_has_the_dead_rows_of_a_whole_vocabulary(run: Any, tmp_path: Path) -> None:
    path, values = run
    assert trajstore.export(path, tmp_path / "f", layout="thimble-8").tokens == len(DEAD)
    file = load_file(tmp_path / "f")
    assert (file["W"] == values["W"].view("u2")[:, DEAD]).all()
    assert file["dead_mask"].shape == (TOKENS,)
    assert file["dead_indices"].tolist() == DEAD
    assert (file["g"][0] == 0).all()
    trajstore.export(path, tmp_path / "g", layout="thimble-8", tokens=[1, 3, 6])
    file = load_file(tmp_path / "g")
    assert np.flatnonzero(file["dead_mask"]).tolist() == file["dead_indices"].tolist() == [3, 6]
    assert (file["W"] == values["W"].view("u2")[:, [3, 6]]).all()


def test_dead_and_live_tokens_in_arrays_of_their_own(run: Any, tmp_path: Path) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout="14.1a-split")
    file = load_file(tmp_path / "f")
    live = [token for token in range(TOKENS) if token not in DEAD]
    W, grad = f4(values["W"]), f4(values["grad"])
    for name, tokens in (("dead", DEAD), ("live", live)):
        assert file[f"{name}_token_ids"].tolist() == tokens
        # Row 0 is the first step.
        assert (file[f"{name}_grads"] == grad[1:, tokens]).all()
        assert (file[f"{name}_deltas"] == (W[1:] - W[:-1])[:, tokens]).all()
    assert file["recorded_steps"].tolist() == list(range(1, ROWS))
    done = trajstore.export(path, tmp_path / "later", layout="14.1a-split", steps="3:6")
    assert load_file(tmp_path / "later")["recorded_steps"].tolist() == [3, 4, 5]
    assert done.rows == 3


@pytest.fixture
def with_hidden(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """A run with gradients and hidden_mean: its path, W and hidden_mean."""
    rng = np.random.default_rng(1)
    W = rng.normal(size=(6, 5, 2)).astype(ml_dtypes.bfloat16).astype("f4")
    W[3] = W[2]
    h = rng.normal(size=(6, 2)).astype("f4")
    types = {"W": "bfloat16", "grad": "float32", "hidden_mean": "float32", "loss": "float32"}
    with trajstore.RunWriter.create(
        tmp_path / "hidden.zarr", token=range(5), hidden=2, variables=types, is_dead=[1, 0, 0, 1, 0]
    ) as writer:
        for step in range(6):
            none = np.float32(np.nan if step == 0 else 1)
            writer.append(
                step, W=W[step], grad=W[step] * none, hidden_mean=h[step] * none, loss=none
            )
    return tmp_path / "hidden.zarr", W, h


@pytest.mark.parametrize(
    ("layout", "tokens"), [("crucible-2", [0, 3]), ("crucible-2-all", [0, 1, 2, 3, 4])]
)
def test_crucible_2_begins_with_step_1(
    with_hidden: Any, tmp_path: Path, layout: str, tokens: list[int]
) -> None:
    path, W, h = with_hidden
    trajstore.export(path, tmp_path / "f", layout=layout)
    file = load_file(tmp_path / "f")
    exact = W[:, tokens].astype("f8")
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact[:-1]))) - 7)
    assert file["W"].dtype == np.uint16
    assert (file["W"] == (W[:, tokens].view("u4") >> 16)).all()
    assert file["delta_W_prime"].dtype == file["g"].dtype == np.float32
    assert (file["delta_W_prime"] == np.diff(exact, axis=0) / spacing).all()
    assert (file["g"] == W[1:, tokens]).all()
    assert ("h_mean" in file) == (layout == "crucible-2-all")
    assert file["dead_indices"].tolist() == [0, 3]
    assert len(file["loss"]) == 6
    ds = trajstore.open_run(
        trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr").path
    ).load()
    assert (ds.W.values == W[:, tokens]).all()
    assert (ds.grad.values[1:] == W[1:, tokens]).all()
    assert np.isnan(ds.grad.values[0]).all()
    if "h_mean" in file:
        assert (file["h_mean"] == h[1:]).all()
        assert (ds.hidden_mean.values[1:] == h[1:]).all()


def test_derived_arrays_of_an_own_layout_are_omitted_under_any_name(
    with_hidden: Any, tmp_path: Path
) -> None:
    path, W, _ = with_hidden
    own = tmp_path / "own.toml"
    own.write_text(
        'arrays.W = "W"\narrays.deltas = {variable = "W", time = "ulps", type = "float32"}'
    )
    trajstore.export(path, tmp_path / "f", layout=str(own))
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr", layout=str(own))
    assert {"deltas": "derived from other arrays"}.items() <= {
        line.name: line.why for line in back.table
    }.items()
    ds = trajstore.open_run(back.path)
    assert "delta" not in ds
    assert (ds.W.values == W).all()


def test_spacings_that_are_not_of_bfloat16_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    variables = {"W": "float32"}
    with trajstore.RunWriter.create(
        path, token=range(2), hidden=1, variables=variables, is_dead=[1, 0]
    ) as writer:
        for step in range(2):
            writer.append(step, W=np.full((2, 1), 1 + step, "f4"))
    done = trajstore.export(path, tmp_path / "f", layout="crucible-2")
    assert load_file(tmp_path / "f")["delta_W_prime"].tolist() == [[[2.0**23]]]
    assert "delta_W_prime counts spacings of float32, the type of W in the run" in done.notes
    assert any(note.startswith("g, m, v, loss omitted: the run does not") for note in done.notes)


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    """Two runs that differ in values, seed and sigma."""
    paths = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    for number, path in enumerate(paths):
        config = CONFIG | {
            "training": CONFIG["training"] | {"seed": 42 + number},
            "initialization": {"kind": "point", "sigma": 0.01 * (number + 1)},
        }
        write_run(
            path, ALL | {"loss": "bfloat16"}, rows=ROWS, tokens=TOKENS, hidden=3, seed=number,
            config=config, attributes={"optimizer": OPTIMIZER},
        )  # fmt: skip
    return paths


def assert_both_come_back(paths: list[Path], back: Path, names: tuple[str, str]) -> None:
    for path, name in zip(paths, names, strict=True):
        besides = ("token_count", "token_text", "is_dead")
        assert_same_run(path, back.with_suffix(f".{name}.zarr"), besides=besides)


def test_runs_along_a_first_axis(two_runs: list[Path], tmp_path: Path) -> None:
    done = trajstore.export(two_runs, tmp_path / "f", layout="flannel-5")
    file = load_file(tmp_path / "f")
    assert file["W"].shape == (2, ROWS, TOKENS, 3)
    assert file["losses"].shape == (2, ROWS)
    assert file["init_scales"].tolist() == np.array([0.01, 0.02], "f4").tolist()
    assert (file["n_runs"], file["n_steps"], file["n_dead"]) == (2, 10, len(DEAD))
    assert file["recorded_grads"].dtype == bool
    assert file["recorded_grads"]
    assert "fixed_seed omitted: the runs differ" in done.notes
    assert "is_dead, token_count, token_text omitted: not part of layout flannel-5" in done.notes
    trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert_both_come_back(two_runs, tmp_path / "back.zarr", ("0", "1"))
    trajstore.export(two_runs[:1], tmp_path / "g", layout="flannel-5", variables="W,loss")
    one = load_file(tmp_path / "g")
    assert (one["W"][0] == file["W"][0]).all()
    assert one["fixed_seed"] == 42
    assert not one["recorded_grads"]


def test_flannel_7_has_other_keys_than_flannel_5(two_runs: list[Path], tmp_path: Path) -> None:
    trajstore.export(two_runs[0], tmp_path / "f", layout="flannel-7")
    file = load_file(tmp_path / "f")
    assert file["W_initial"].tobytes() == file["W"][0, 0].tobytes()
    assert (file["batch_size"], file["init_seed"], file["train_seed"]) == (32, 42, 42)
    assert file["init_scale"] == np.float32(0.01)
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == "flannel-7"
    ds, again = (trajstore.open_run(each) for each in (two_runs[0], back.path))
    for name in again.data_vars:
        assert again[name].values.tobytes() == ds[name].values.tobytes(), name
    trajstore.export(two_runs, tmp_path / "g", layout="flannel-7")
    both = load_file(tmp_path / "g")
    assert both["W_initial"].tobytes() == both["W"][:, 0].tobytes()
    with pytest.raises(InvalidArgument, match="layout flannel-7 needs W of step 0"):
        trajstore.export(_later(tmp_path), tmp_path / "h", layout="flannel-7")


def _later(tmp_path: Path) -> Path:
    """A run that begins with step 3."""
    with trajstore.RunWriter.create(
        tmp_path / "later.zarr", token=[0], hidden=1, variables={"W": "bfloat16"}
    ) as run:
        run.append(3, W=np.zeros((1, 1), "f4"))
    return tmp_path / "later.zarr"


def test_num_steps_and_sizes_fit_the_rows(tmp_path: Path) -> None:
    """Without a configuration, and with one that announces other steps."""
    for name, config in (("none", {}), ("stopped", {"training": {"steps": 10_000}})):
        run = tmp_path / name
        write_run(run, ALL, rows=ROWS, tokens=TOKENS, hidden=3, config=config)
        trajstore.export(run, run / "f", layout="thimble-4", steps="::5")
        file = load_file(run / "f")
        assert file["num_steps"] == len(file["W"]) - 1
        assert (file["vocab_size"], file["hidden_dim"]) == (TOKENS, 3)
        trajstore.export(run, run / "g", layout="1.12a", steps=":7")
        with safe_open(run / "g", "np") as opened:
            assert opened.metadata()["n_steps"] == "6"
        back = trajstore.import_file(run / "f", run / "back.zarr")
        stated = trajstore.open_run(back.path).attrs["config"]["training"]["steps"]
        assert stated == back.last_step


def test_runs_under_numbered_keys(two_runs: list[Path], tmp_path: Path) -> None:
    done = trajstore.export(two_runs, tmp_path / "f", layout="flannel-3")
    file = load_file(tmp_path / "f")
    assert file["run_1_embeddings"].shape == (ROWS, TOKENS, 3)
    assert file["run_0_recorded_steps"].tolist() == list(range(ROWS))
    assert (file["n_runs"], file["base_seed"], file["n_dead"]) == (2, 42, len(DEAD))
    assert "init_scale omitted: the runs differ" in done.notes
    trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert_both_come_back(two_runs, tmp_path / "back.zarr", ("0", "1"))


def test_both_matrices_of_one_training(two_runs: list[Path], tmp_path: Path) -> None:
    trajstore.export(two_runs, tmp_path / "f", layout="flannel-2")
    file = load_file(tmp_path / "f")
    assert not file["tied_weights"]
    trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    for path, name in zip(two_runs, "EW", strict=True):
        besides = ("token_count", "token_text", "is_dead", "logits", "loss")
        assert_same_run(path, tmp_path / f"back.{name}.zarr", besides=besides)


def test_matrices_are_ordered_by_their_names(tmp_path: Path) -> None:
    paths = {}
    for name, value in (("lm_head.weight", 1), ("wte.weight", 2)):
        paths[name] = tmp_path / f"{name}.zarr"
        with trajstore.RunWriter.create(
            paths[name], token=[0], hidden=1, variables={"W": "float32"},
            attributes={"recording": {"parameter": name}},
        ) as writer:  # fmt: skip
            writer.append(0, W=np.full((1, 1), value, "f4"))
    trajstore.export(paths.values(), tmp_path / "f", layout="flannel-2")
    file = load_file(tmp_path / "f")
    assert (file["embeddings_E"].item(), file["embeddings_W"].item()) == (2, 1)
    with pytest.raises(InvalidArgument, match=r"got the runs of wte\.weight and wte\.weight"):
        trajstore.export([paths["wte.weight"]] * 2, tmp_path / "g", layout="flannel-2")


def test_runs_that_do_not_fit_one_file(two_runs: list[Path], tmp_path: Path) -> None:
    a, b = two_runs
    write_run(tmp_path / "c.zarr", ALL, rows=4, tokens=TOKENS, hidden=3)
    write_run(tmp_path / "d.zarr", ALL, rows=ROWS, tokens=TOKENS - 1, hidden=3)
    write_run(tmp_path / "e.zarr", ALL, rows=ROWS, tokens=TOKENS, hidden=2)
    for layout, runs, message in (
        ("15.1a", [a, b], "got 2 runs, expected one for layout 15.1a"),
        ("native", [a, b], "got 2 runs, expected one"),
        ("native", [], "got 0 runs, expected one"),
        ("flannel-2", [a], "both matrices"),
        ("flannel-5", [a, tmp_path / "c.zarr"], "run 1 has 4 rows"),
        ("flannel-3", [a, tmp_path / "d.zarr"], "token of run 1 differs"),
        ("flannel-5", [a, tmp_path / "e.zarr"], r"W of run 1 has shape \(11, 7, 2\)"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            trajstore.export(runs, tmp_path / "f", layout=layout)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("layout", MASKS)
def test_masks_label_the_tokens_of_an_import(run: Any, tmp_path: Path, layout: str) -> None:
    path, _ = run
    masks = tmp_path / f"masks_{layout}"
    done = trajstore.export(path, masks, layout=layout)
    assert (done.rows, done.notes) == (0, ())
    if not LAYOUTS[layout].only:
        (note,) = trajstore.export(path, tmp_path / "some", layout=layout, tokens=DEAD).notes
        assert f"of the {len(DEAD)} tokens of the export only" in note
    file = load_file(masks)
    assert {*file} == {*LAYOUTS[layout].marks, *LAYOUTS[layout].numbers}
    if layout == "token-counts":
        counts = trajstore.open_run(path).token_count.values
        assert file["token_occurrence_counts"].tolist() == counts.tolist()
    trajstore.export(path, tmp_path / "f", layout="08.2a")
    trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr", masks=masks)
    ds = trajstore.open_run(tmp_path / "back.zarr")
    assert ds.token.values[ds.is_dead.values].tolist() == DEAD


def test_derived_arrays_of_crucible(run: Any, tmp_path: Path) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout="crucible-1")
    file, W = load_file(tmp_path / "f"), f4(values["W"])[:, DEAD]
    np.testing.assert_allclose(file["centroid"], W.mean(1), rtol=1e-6)
    moved = (W[1:] != W[:-1]).any(-1)
    last = [max((1 + np.flatnonzero(each)).tolist(), default=-1) for each in moved.T]
    assert file["last_motion_step"].dtype == np.int32
    assert file["last_motion_step"].tolist() == last
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('like = "crucible-1"\n[arrays]\ncentroids = false\n')
    with pytest.raises(InvalidArgument, match=r"has no 'centroids' \(did you mean 'centroid'"):
        trajstore.export(path, tmp_path / "g", layout=str(wrong))


OWN = """
like = "thimble-8"
steps = "t"
marks = ["dead_indices", "live_mask"]
numbers = ["n_dead", "lr", "seed"]
[arrays]
W = false
g = false
v = false
m = {variable = "exp_avg", tokens = "live"}
weights = {variable = "W", type = "bfloat16", bits = true, tokens = "all"}
velocity = {variable = "W", time = "change", first_row = 1}
slope = {variable = "grad", first_row = 1}
"""


def test_a_layout_of_a_toml_file(run: Any, tmp_path: Path) -> None:
    path, values = run
    (tmp_path / "own.toml").write_text(OWN)
    own = str(tmp_path / "own.toml")
    done = trajstore.export(path, tmp_path / "f", layout=own, steps=":5")
    file = load_file(tmp_path / "f")
    W = f4(values["W"])
    assert set(file) == {"t", "weights", "velocity", "slope", "dead_indices", "live_mask", "n_dead",
                         "lr", "m", "loss"}  # fmt: skip
    live = [token for token in range(TOKENS) if token not in DEAD]
    assert (file["m"][1:] == f4(values["exp_avg"])[1:5, live]).all(), (
        "it replaces that of thimble-8"
    )
    assert (file["loss"][1:] == values["loss"][1:5]).all(), "it is that of thimble-8"
    assert any("seed omitted" in note for note in done.notes)
    assert file["t"].tolist() == list(range(5))
    assert (file["weights"] == values["W"][:5].view("u2")).all()
    assert (file["velocity"] == (W[1:5] - W[:4])[:, DEAD]).all()
    assert (file["slope"] == f4(values["grad"])[1:5, DEAD]).all()
    done = trajstore.export(path, tmp_path / "later", layout=own, steps="3:")
    later = load_file(tmp_path / "later")
    assert later["slope"].tobytes() == f4(values["grad"])[4:, DEAD].tobytes()
    assert later["weights"].shape[0] == len(later["slope"]) + 1  # as for rows from step 0
    assert "velocity, slope begin with the row after step 3" in done.notes
    trajstore.export(path, tmp_path / "one", layout=own, steps="0")
    assert load_file(tmp_path / "one")["slope"].shape == (0, len(DEAD), 3)
    (tmp_path / "m.toml").write_text('marks = ["dead_mask"]')
    assert trajstore.export(path, tmp_path / "m", layout=str(tmp_path / "m.toml")).rows == 0
    (tmp_path / "w.toml").write_text('[arrays]\nx = "W"\ny = "loss"\n')
    trajstore.export(path, tmp_path / "g", layout=str(tmp_path / "w.toml"))
    trajstore.import_file(tmp_path / "g", tmp_path / "b.zarr", layout=str(tmp_path / "w.toml"))
    assert (trajstore.open_run(tmp_path / "b.zarr").W.values == W).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrays = \n", r"own.toml is not valid TOML: .*line 1.*; correct this place"),
        ('step = "x"', "there is no key 'step' .did you mean 'steps'"),
        ("numbers = []", "got no arrays"),
        ('marks = ["dead"]', "there is no mark 'dead'"),
        ('marks = "dead_mask"', "got marks='dead_mask', expected a mapping"),
        ('marks = ["token_ids"]', "token_ids; say of which: tokens = "),
        ('numbers = ["size"]\narrays.W = "W"', "there is no number 'size'"),
        ('arrays.W = "w"', r"arrays.W: there is no variable 'w' .did you mean 'W'"),
        ("arrays.W = {first_row = 1}", "got no variable, expected a key"),
        ('arrays.W = {variable = "W", type = "float32", bits = true}', "a type of 16 bits"),
        ('arrays.W = {variable = "W", time = "ulps"}', "expected W in float32"),
        ('chunk_rows = 0\narrays.W = "W"', "got chunk_rows=0"),
        ('steps = 3\narrays.W = "W"', "got steps=3, expected a string"),
        ('bits = "yes"\narrays.W = "W"', "arrays.W: got bits='yes', expected True or False"),
        ('format = "hdf5"\nruns = "axis"\narrays.W = "W"', "is for safetensors"),
    ],
)
def test_a_wrong_toml_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=message) as caught:
        trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout=str(tmp_path / "own.toml"))
    assert "own.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('steps = "W"\narrays.W = "W"', "W"),
        ('format = "hdf5"\nnumbers = ["n_dead"]\narrays.n_dead = "loss"', "n_dead"),
    ],
)
def test_two_values_under_one_name_are_refused(
    run: Any, tmp_path: Path, text: str, key: str
) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=rf"own.toml has '{key}' twice"):
        trajstore.export(run[0], tmp_path / "f", layout=str(tmp_path / "own.toml"))


OF_ONE_RUN = [name for name, one in LAYOUTS.items() if one.columns and one.runs is None]


@pytest.mark.parametrize("layout", OF_ONE_RUN)
def test_every_layout_goes_out_and_comes_back(run: Any, tmp_path: Path, layout: str) -> None:
    path, _ = run
    if LAYOUTS[layout].format == "hdf5":
        pytest.importorskip("h5py")
    done = trajstore.export(path, tmp_path / "f", layout=layout)
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == layout
    ds, whole = trajstore.open_run(back.path).load(), trajstore.open_run(path).load()
    whole = whole.sel(token=ds.token, step=ds.step)
    whole_bits = LAYOUTS[layout].columns[0].type != "float16" and layout != "1.12a"
    for name in {"W", "grad", "token", "is_dead"} & {*ds.variables} if whole_bits else ():
        assert np.array_equal(ds[name], whole[name], equal_nan=ds[name].dtype.kind == "f"), name
    again = trajstore.export(back.path, tmp_path / "again", layout=layout)
    absent = [[note for note in one.notes if "not recorded" in note] for one in (done, again)]
    assert absent[0] == absent[1]
    if layout == "1.12a":
        return  # what came after the last step is not in the file
    if LAYOUTS[layout].format == "safetensors":
        first, second = load_file(tmp_path / "f"), load_file(tmp_path / "again")
        assert first.keys() >= {LAYOUTS[layout].columns[0].key}
        for column in LAYOUTS[layout].columns:
            if column.key in first:
                assert first[column.key].tobytes() == second[column.key].tobytes(), column.key
        for key in LAYOUTS[layout].marks:
            if MARKS[key] == "dead_ids":
                assert first[key].tolist() == second[key].tolist() == DEAD


def rows(dtype: str, *runs: str) -> str:
    arrays = {3: "embeddings grads momentum variance", 2: "logits", 1: "losses"}
    forms = {name: f"{dtype} {rank}" for rank, names in arrays.items() for name in names.split()}
    forms["recorded_steps"] = "int64 1"
    return " | ".join(f"{forms[name]}: {run}{name}" for run in runs or ("",) for name in forms)


IDS = "int64 1: dead_token_ids live_token_ids | float32 0: init_sigma"
RATES = "float32 0: learning_rate weight_decay adam_beta1 adam_beta2"
LIL = f"{IDS} | {RATES} | int32 0: init_method_code"
FIRST = f"{IDS} learning_rate weight_decay | int64 1: recorded_steps | float32 3:"
COUNTED = f"{RATES} init_scale | int64 0: n_live n_dead"
FLANNEL = f"bfloat16 4: W | bfloat16 2: losses | bool 0: recorded_W recorded_losses | {COUNTED} "
FLANNEL += "n_runs n_steps vocab_size hidden_dim"
OTHERS = "bool 0: recorded_grads recorded_momentum recorded_variance"
THIMBLE = f"float32 0: adam_epsilon | float32 1: losses | {COUNTED} vocab_size hidden_dim n_layers"
THIMBLE += " n_heads num_steps batch_size seed"
MARKED = f"{THIMBLE} | bool 1: live_mask dead_mask | int64 1: live_ids dead_ids"
ALL_W = "W grad_W momentum_W variance_W"
OF_DEAD = "uint16 3: W | float32 1: loss | bool 1: dead_mask | int64 1: dead_indices"
UNTIED = "embeddings_E embeddings_W grads_E grads_W momentum_E momentum_W variance_E variance_W"
THEIR_FILES = {
    "14.1a 14.1g 14.2a": f"{FIRST} grads deltas",
    "14.1b 14.1c 14.1d 14.1e 14.1f": f"{FIRST} dead_grads dead_deltas live_grads live_deltas",
    "15.1a 15.1b 1.9b 1.9c 1.9d": f"{LIL} | {rows('float32')}",
    "13.1a 13.1b": f"{LIL} | {rows('bfloat16')}",
    "1.12c 1.12d 1.12f": f"{rows('bfloat16')} | {RATES} init_scale | int64 0: n_trained "
    "n_untrained",
    "flannel-1": f"{COUNTED} | {rows('bfloat16')}",
    "flannel-2": f"{COUNTED} | int64 1: recorded_steps | bool 0: tied_weights | bfloat16 2: logits "
    f"| bfloat16 1: losses | bfloat16 3: {UNTIED}",
    "flannel-3": f"{COUNTED} n_runs base_seed n_steps | {rows('bfloat16', 'run_0_', 'run_1_')}",
    "flannel-4": f"{FLANNEL} base_seed | {OTHERS} recorded_logits",
    "flannel-5": f"{FLANNEL} fixed_seed | {OTHERS} recorded_logits | float32 1: init_scales",
    "flannel-6 flannel-6b": f"{FLANNEL} init_seed base_train_seed | bfloat16 2: W_initial",
    "flannel-7": f"{FLANNEL} init_seed train_seed batch_size | bfloat16 2: W_initial | {OTHERS} "
    "| bfloat16 4: grad_W | float32 4: momentum_W variance_W",
    "thimble-1": f"{THIMBLE} | bfloat16 3: W grad_W | float32 3: momentum_W variance_W",
    "thimble-2": f"{THIMBLE} | float32 3: {ALL_W}",
    "thimble-3": f"{THIMBLE} | bfloat16 3: {ALL_W}",
    "thimble-4 thimble-5": f"{MARKED} | bfloat16 3: {ALL_W}",
    "thimble-6": f"{MARKED} | float16 3: {ALL_W}",
    "thimble-7": f"{MARKED} | uint16 3: {ALL_W}",
    "thimble-8": f"{OF_DEAD} | float32 3: g m v",
    "thimble-9": OF_DEAD,
    "crucible-1": f"{OF_DEAD} | float32 3: delta_W_prime | float32 2: centroid "
    "| int32 1: last_motion_step",
    "crucible-2": f"{OF_DEAD} | float32 3: g m v delta_W_prime | int32 1: last_motion_step",
    "crucible-3 crucible-4": f"{OF_DEAD} | float32 2: h_mean",
}
"""Type, rank and names of the arrays in files of the notebooks, as their last versions save them.
Flannel 5 has `init_scales` only."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs with several seeds of the training and one initial W."""
    paths = [tmp_path_factory.mktemp("seeds") / f"{seed}.zarr" for seed in (42, 43)]
    rule = OPTIMIZER["hyperparameters"] | {"eps": 1e-8}
    for path in paths:
        config = CONFIG | {
            "training": CONFIG["training"] | {"seed": int(path.stem)},
            "initialization": CONFIG["initialization"] | {"seed": 42},
        }
        write_run(
            path, ALL | {"hidden_mean": "float32"}, rows=4, tokens=TOKENS, hidden=3, config=config,
            attributes={"optimizer": {"hyperparameters": rule}},
        )  # fmt: skip
    return paths


@pytest.mark.parametrize("name", " ".join(THEIR_FILES).split())
def test_the_files_of_each_notebook(seeds: list[Path], tmp_path: Path, name: str) -> None:
    """Its name gives the keys, types and ranks of its files, and an import recognizes them."""
    lines = next(lines for names, lines in THEIR_FILES.items() if name in names.split())
    parts = [line.partition(":") for line in lines.split(" | ")]
    expected = {key: form for form, _, keys in parts for key in keys.split()}
    layout = LAYOUTS[NAMES[name]]
    chosen = "W,loss" if name in ("flannel-4", "flannel-5") else None
    runs = seeds if layout.runs and name != "flannel-7" else seeds[:1]
    if name in ("flannel-2", "flannel-5"):
        runs = seeds[:1] * 2
    if name == "flannel-5":
        del expected["init_scale"]
    trajstore.export(runs, tmp_path / "f", layout=name, variables=chosen)
    if layout.format == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "f") as f:
            arrays = {key: f"{each.dtype} {each.ndim}" for key, each in f.items()}
            numbers = {key for key, value in f.attrs.items() if not isinstance(value, bytes)}
        assert arrays == {key: form for key, form in expected.items() if not form.endswith("0")}
        assert numbers == expected.keys() - arrays.keys()
        return
    file = load_file(tmp_path / "f")
    assert {key: f"{each.dtype} {each.ndim}" for key, each in file.items()} == expected
    save_file(file, tmp_path / "theirs.safetensors")  # without the name of the layout
    back = trajstore.import_file(tmp_path / "theirs.safetensors", tmp_path / "back.zarr")
    if layout.runs not in ("keys", "matrices"):  # the usual names suffice for these
        assert back.layout == layout.name
    for run, copy in zip(runs, sorted(tmp_path.glob("back*.zarr")), strict=True):
        one, other = trajstore.open_run(run), trajstore.open_run(copy)
        for each in {"W", "grad"} & {*other.data_vars}:
            assert (other[each] == one[each].sel(token=other.token))[1:].all(), each


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_key_of_a_layout_is_understood(tmp_path: Path, layout: str) -> None:
    """The table of layouts and that of kinds agree; printed as TOML, it says the same arrays."""
    for column in LAYOUTS[layout].columns:
        name = named(column.key)
        assert (name and name.kind.name) == column.kind, column.key
    (tmp_path / "own.toml").write_text(as_toml(LAYOUTS[layout]))
    assert layout_of(str(tmp_path / "own.toml")).arrays == LAYOUTS[layout].arrays


def test_every_layout_names_the_files_that_have_it() -> None:
    """In the line of comment before its table, which the appendix of the documentation shows."""
    text = (Path(layouts.__file__).with_name("layouts.toml")).read_text("utf-8")
    assert {*LAYOUTS} - {*re.findall(r'^# .+\.\n\["(.+?)"\]$', text, re.MULTILINE)} == set()


def test_sgd_has_moments_of_zero_as_their_files_had(tmp_path: Path) -> None:
    variables = {name: kind for name, kind in ALL.items() if not name.startswith("exp_avg")}
    optimizer = {"class": "torch.optim.sgd.SGD", "hyperparameters": {"lr": 0.1, "momentum": 0.0}}
    config = CONFIG | {"initialization": {"kind": "point", "dtype": "bfloat16"}}
    write_run(
        tmp_path / "run.zarr", variables, rows=4, tokens=5, hidden=2,
        config=config, attributes={"optimizer": optimizer},
    )  # fmt: skip
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="15.1a")
    file = load_file(tmp_path / "f")
    for key in ("momentum", "variance"):
        assert file[key].shape == (4, 5, 2)
        assert (file[key] == 0).all()
    assert file["adam_beta1"] == file["adam_beta2"] == 0
    assert file["init_method_code"] == 1
    assert any("momentum, variance are 0: SGD has no moments" in note for note in done.notes)
