"""What the notebooks' files hold, row by row, against a run that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_runs import assert_same_run, write_run
from safetensors import safe_open
from safetensors.numpy import load_file

import trajstore
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange.guessing.kind_table import named, scalar_of
from trajstore.exchange.layouts import LAYOUTS, POPULATIONS

ALL = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "bfloat16",
    "exp_avg_sq": "bfloat16",
    "logits": "bfloat16",
    "loss": "float32",
}
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


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path / "run.zarr"
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
    assert set(file) == {
        *names, "logits", "losses", "recorded_steps", "dead_token_ids", "live_token_ids",
        "init_sigma", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
        "init_method_code",
    }  # fmt: skip
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == "15.1a"
    assert_same_run(path, tmp_path / "back.zarr", besides=("token_count", "token_text"))


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
    assert set(file) == {
        "recorded_steps", "dead_token_ids", "live_token_ids", "grads", "deltas", "init_sigma",
        "learning_rate", "weight_decay",
    }  # fmt: skip
    done = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert done.layout == "14.1a"
    assert set(done.variables) == {"grad", "delta"}
    assert any("no W" in note for note in done.notes)
    # What was imported so goes out so again.
    trajstore.export(tmp_path / "back.zarr", tmp_path / "again", layout="14.1a")
    again = load_file(tmp_path / "again")
    assert all((again[key] == file[key]).all() for key in file)


def test_1_12f(run: Any, tmp_path: Path) -> None:
    path, values = run
    done = trajstore.export(path, tmp_path / "f", layout="1.12f")
    file = load_file(tmp_path / "f")
    names = {"embeddings": "W", "grads": "grad", "momentum": "exp_avg", "variance": "exp_avg_sq"}
    for key, name in (names | {"logits": "logits"}).items():
        assert file[key].dtype == ml_dtypes.bfloat16
        assert file[key][1:].tobytes() == values[name][1:].tobytes()
    assert file["losses"].dtype == ml_dtypes.bfloat16
    assert np.isnan(f4(file["losses"])[0])
    assert (file["losses"][1:] == values["loss"].astype(ml_dtypes.bfloat16)[1:]).all()
    assert any("values of losses were rounded" in note for note in done.notes)
    assert file["n_trained"] == TOKENS - len(DEAD)
    assert file["n_untrained"] == len(DEAD)
    assert file["init_scale"] == np.float32(1e-5)
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == "1.12f"
    assert back.variables == dict.fromkeys(ALL, "bfloat16")
    besides = ("token_count", "token_text", "loss")
    assert_same_run(path, tmp_path / "back.zarr", besides=besides)


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
    with pytest.raises(InvalidArgument, match="before step 10"):
        trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12a")
    assert not (tmp_path / "f").exists()


def test_missing_variables_and_unknown_scalars(tmp_path: Path) -> None:
    variables = {"W": "bfloat16", "grad": "bfloat16"}
    write_run(tmp_path / "run.zarr", variables, rows=4, tokens=3, hidden=2)
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "part", layout="15.1a")
    assert set(load_file(tmp_path / "part")) >= {"embeddings", "grads"}
    assert any("momentum, variance, logits, losses omitted" in note for note in done.notes)
    loss = variables | {"loss": "float32"}
    write_run(tmp_path / "other.zarr", loss, rows=2, tokens=2, hidden=2)
    with pytest.raises(VariableNotRecorded, match="but the selection has loss"):
        trajstore.export(tmp_path / "other.zarr", tmp_path / "x", layout="14.1a", variables="loss")
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="14.1a")
    assert any("init_sigma, learning_rate, weight_decay omitted" in note for note in done.notes)
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "g", layout="14.1a", variables="grad")
    assert any("deltas omitted" in note for note in done.notes)


def test_float32_weights_are_rounded_only_audibly(tmp_path: Path) -> None:
    bits = write_run(
        tmp_path / "run.zarr", dict.fromkeys(ALL, "float32"), rows=5, tokens=3, hidden=2
    )
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12f")
    W = bits["W"].view("f4")
    expected = W.astype(ml_dtypes.bfloat16)
    assert (load_file(tmp_path / "f")["embeddings"] == expected).all()
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


def test_a_cell_that_reads_the_dead_gradients_of_14_1a(run: Any, tmp_path: Path) -> None:
    """The first form of those files: gradients and changes of the dead tokens alone."""
    path, values = run
    done = trajstore.export(path, tmp_path / "f", layout="14.1a-dead")
    data = load_file(tmp_path / "f")
    steps, dead = data["recorded_steps"], data["dead_token_ids"]
    grads, deltas = data["dead_grads"], data["dead_deltas"]
    W = f4(values["W"])
    assert steps.tolist() == list(range(ROWS))
    assert dead.tolist() == DEAD
    assert grads.shape == deltas.shape == (ROWS, len(DEAD), 3)
    assert (grads[0] == 0).all()
    assert (grads[1:] == f4(values["grad"])[1:, DEAD]).all()
    assert (deltas[1:] == (W[1:] - W[:-1])[:, DEAD]).all()
    norms = np.linalg.norm(grads[1:], axis=2)
    assert norms.shape == (ROWS - 1, len(DEAD))
    assert done.tokens == len(DEAD)
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    ds = trajstore.open_run(back.path).load()
    assert back.layout == "14.1a-dead"
    assert ds.token.values.tolist() == DEAD
    assert ds.is_dead.values.all()
    assert (ds.delta.values[1:] == deltas[1:]).all()
    assert (ds.grad.values[1:] == grads[1:]).all()


def test_thimble_8_has_the_dead_rows_of_a_whole_vocabulary(run: Any, tmp_path: Path) -> None:
    path, values = run
    trajstore.export(path, tmp_path / "f", layout="thimble-8")
    file = load_file(tmp_path / "f")
    assert (file["W"] == values["W"].view("u2")[:, DEAD]).all()
    assert file["dead_mask"].shape == (TOKENS,)
    assert file["dead_indices"].tolist() == DEAD
    assert (file["g"][0] == 0).all()
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    ds = trajstore.open_run(back.path).load()
    assert ds.token.values.tolist() == DEAD
    assert (ds.W.values == f4(values["W"])[:, DEAD]).all()
    expected = f4(values["grad"])[:, DEAD]
    assert np.array_equal(ds.grad.values, expected, equal_nan=True)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_layout_goes_out_and_comes_back(run: Any, tmp_path: Path, layout: str) -> None:
    path, _ = run
    if LAYOUTS[layout].format == "hdf5":
        pytest.importorskip("h5py")
    trajstore.export(path, tmp_path / "f", layout=layout)
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == layout
    again = trajstore.export(back.path, tmp_path / "again", layout=layout)
    assert not any("not recorded" in note for note in again.notes)
    if layout == "1.12a":
        return  # what came after the last step is not in the file
    if LAYOUTS[layout].format == "safetensors":
        first, second = load_file(tmp_path / "f"), load_file(tmp_path / "again")
        for column in LAYOUTS[layout].columns:
            assert first[column.key].tobytes() == second[column.key].tobytes(), column.key


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_key_of_a_layout_is_understood(layout: str) -> None:
    """The table of layouts and that of kinds agree."""
    for column in LAYOUTS[layout].columns:
        kind = named(column.key).kind
        expected = "delta" if column.time == "change" else column.variable
        assert kind is not None
        assert kind.name == expected, column.key
    for key in LAYOUTS[layout].populations:
        form, marks_dead = POPULATIONS[key]
        kind = named(key).kind
        assert kind is not None
        assert kind.name == f"{'dead' if marks_dead else 'live'}_{form}"
    for key in (*LAYOUTS[layout].scalars, *LAYOUTS[layout].as_texts):
        assert scalar_of(key) is not None, key


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


def test_a_run_of_w_alone_and_one_without_dead_tokens(tmp_path: Path) -> None:
    with trajstore.RunWriter.create(
        tmp_path / "run.zarr", token=[0, 1], hidden=2, variables={"W": "float32"}
    ) as writer:
        for step in range(3):
            writer.append(step=step, W=np.full((2, 2), step, "f4"))
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12f")
    assert set(load_file(tmp_path / "f")) == {"recorded_steps", "embeddings"}
    assert any("grads, momentum, variance, logits, losses omitted" in n for n in done.notes)
    assert any("does not record which tokens are dead" in note for note in done.notes)
    with pytest.raises(VariableNotRecorded, match="holds dead tokens only"):
        trajstore.export(tmp_path / "run.zarr", tmp_path / "g", layout="thimble-8")


def test_what_a_layout_has_no_place_for_is_said(tmp_path: Path) -> None:
    types = {"W": "bfloat16", "loss": "float32", "lr": "float64", "hidden_mean": "float32"}
    with trajstore.RunWriter.create(
        tmp_path / "run.zarr", token=range(4), hidden=3, variables=types, is_dead=[1, 0, 0, 1],
        token_count=[0, 1, 2, 0],
    ) as run:  # fmt: skip
        for step in range(2):
            values = {"W": np.zeros((4, 3), "f4"), "hidden_mean": np.ones(3, "f4"), "lr": 0.5}
            values["loss"] = np.float32(np.nan if step == 0 else 1)
            run.append(step, **values)
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="13.1b")
    assert "lr, hidden_mean, token_count omitted: not part of layout 13.1b" in done.notes
    assert done.variables == ("W", "loss")
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "g", layout="08.2a")
    assert "loss, lr, hidden_mean, is_dead, token_count omitted: not part of layout 08.2a" in (
        done.notes
    )
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "h")
    assert (done.variables, done.notes) == (("W", "loss", "lr", "hidden_mean"), ())
