"""Imports: files by the names of their arrays, options, targets, limits, types of the values."""

from __future__ import annotations

import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_runs import FORMATS, imported, stored, truth, write
from safetensors.numpy import save_file

import trajstore
from trajstore.errors import FormatError, InvalidArgument, RunExists, RunNotFound
from trajstore.exchange.file_rows import check_size, checked_labels, true_steps
from trajstore.exchange.layouts import layout_of
from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS, named
from trajstore.formats.array_file import check_expansion
from trajstore.schema import EVERYTHING, INTEGERS, MODEL, OF_EXAMPLES, VARIABLES

KNOWN = truth()
DEAD = np.flatnonzero(KNOWN.dead)


def series(name: str, kind: str = "float32") -> np.ndarray:
    return stored(KNOWN.values[name], kind)


def same(ds: Any, name: str, expected: np.ndarray) -> bool:
    return np.array_equal(ds[name].values, expected, equal_nan=True)


def test_a_file_without_usual_names_is_described_with_the_command_to_edit(tmp_path: Path) -> None:
    arrays = {"my nll": series("loss"), "g": series("grad"), "hessian": series("W")}
    with pytest.raises(FormatError, match="no array with a usual name of W") as error:
        imported(tmp_path, arrays)
    *_, array, _, command = str(error.value).splitlines()
    assert array == "  hessian  float32 (6, 7, 3)"
    assert command == (
        f"  trajstore import {tmp_path / 'file'} --map W=hessian --map 'KIND=my nll' -o run.zarr"
    )
    ds, done = imported(tmp_path, arrays, map={"W": "hessian"})
    assert same(ds, "W", KNOWN.values["W"])
    assert {line.name: line.kind for line in done.table} == {
        "hessian": "W", "g": "grad", "my nll": ""
    }  # fmt: skip
    assert "omitted: my nll (see the table; map={'KIND': 'NAME'} reads one)" in done.notes


def test_arrays_are_mapped_by_the_user(tmp_path: Path) -> None:
    arrays = {"x": series("W"), "dW": series("grad"), "n": series("loss"), "cs": KNOWN.steps * 50}
    options = {"map": {"W": "x", "grad": "dW", "loss": "n"}, "labels": {"steps": "cs"}}
    ds, _ = imported(tmp_path, arrays, **options)
    assert ds.step.values.tolist() == (KNOWN.steps * 50).tolist()
    with pytest.raises(FormatError, match="but is read as W, expected"):
        imported(tmp_path, arrays, map={"W": "n"})
    for name in ("W", "grad", "loss"):
        assert same(ds, name, KNOWN.values[name])
    ds, done = imported(tmp_path, arrays, map={"W": "x", "ignore": ("dW", "n")})
    assert set(ds.data_vars) == {"W"}
    assert any(note.startswith("omitted: dW, n, cs") for note in done.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"map": {"weights": "W"}}, "no kind 'weights'"),
        ({"map": {"W": "y"}}, "holds no 'y'"),
        ({"map": {"W": "W", "loss": "W"}}, "got W mapped to W and to loss"),
        ({"labels": {"steps": "0,1,2,3,5,5"}}, "expected 6 that increase"),
        ({"labels": {"steps": "a"}}, "got steps 'a'"),
        ({"labels": {"steps": "0:9999999999999:1"}}, "got 9999999999999 steps"),
        ({"labels": {"rows": "0:6"}}, "got labels of rows, expected steps"),
        ({"first_row": 1}, "got first_row=1, but steps labels the first row as"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        imported(tmp_path, {"W": series("W"), "steps": KNOWN.steps}, **options)


def test_labels_that_the_user_names_are_kept(tmp_path: Path) -> None:
    counted = [0, 1, 3, 5, 7, 9]  # callbacks
    arrays = {"W": series("W"), "steps": np.array(counted)}
    for text, expected in (("0,1,2,3,5,9", [0, 1, 2, 3, 5, 9]), ("steps", counted)):
        ds, _ = imported(tmp_path, arrays, labels={"steps": text})
        assert ds.step.values.tolist() == expected
    arrays["steps"] = arrays["steps"][::-1].copy()  # replaced, so not read
    ds, done = imported(tmp_path, arrays, labels={"steps": "0:60:10"})
    assert ds.step.values.tolist() == [*range(0, 60, 10)]
    (line,) = [line for line in done.table if line.name == "steps"]
    assert (line.kind, line.why) == ("", "replaced by the given steps")
    arrays["steps"] = np.array(counted)
    ds, done = imported(tmp_path, arrays)
    assert ds.step.values.tolist() == [0, 1, 2, 3, 4, 5]
    assert any("labels={'steps': 'steps'} keeps its labels" in note for note in done.notes)


def test_rows_that_begin_after_the_first_step(tmp_path: Path) -> None:
    arrays = {"W": series("W")[1:], "g": series("grad")[1:], "loss": series("loss")[1:]}
    with pytest.raises(FormatError, match="pass first_row=1"):
        imported(tmp_path, arrays)
    ds, _ = imported(tmp_path, arrays, first_row=1)
    assert ds.step.values.tolist() == [1, 2, 3, 4, 5]
    for name in ("W", "grad", "loss"):
        assert same(ds, name, KNOWN.values[name][1:])
    with pytest.raises(FormatError, match=r"pass labels={'steps': '1:6'}"):
        imported(tmp_path, arrays | {"steps": np.arange(0, 50, 10)})


def test_layout_1_12a_holds_states_before_the_step_of_their_row(tmp_path: Path) -> None:
    texts = dict.fromkeys(layout_of("1.12a").texts, 1) | {"vocab_size": 7, "hidden_dim": 3}
    arrays = {"grads": series("grad"), "loss": series("loss"), "logits": series("logits") + 1}
    for name, key in (("W", "W"), ("exp_avg", "momentum"), ("exp_avg_sq", "variance")):
        whole = series(name)
        arrays[key] = np.concatenate([whole[:1], whole[:-1]])
    # The metadata of the notebook's files identify the layout, or the user does.
    for options in ({"attributes": texts}, {"layout": "1.12a"}):
        ds, done = imported(tmp_path, arrays, "safetensors", **options)
        assert any("shifted by one" in note for note in done.notes)
        for name in ("W", "exp_avg", "exp_avg_sq"):
            assert same(ds.isel(step=slice(None, -1)), name, KNOWN.values[name][:-1])
            assert np.isnan(ds[name].values[-1]).all()
        assert same(ds, "grad", KNOWN.values["grad"])
        assert any("forward pass before the first step" in note for note in done.notes)
        assert same(ds, "logits", KNOWN.values["logits"] + 1)
    # Without either, rows are states after their step. So they are if the user names the first row.
    labels = {"steps": np.arange(6)}  # which files of 1.12a lack
    for more, options in (
        ({}, {}),
        ({}, {"attributes": texts, "first_row": 0}),
        (labels, {"attributes": texts}),
    ):
        ds, _ = imported(tmp_path, arrays | more, "safetensors", **options)
        assert (ds.W.values == arrays["W"]).all()
    del arrays["logits"]
    arrays["W"] = series("W")
    for options in ({"attributes": texts}, {"layout": "1.12a"}):
        with pytest.raises(FormatError, match=r"between rows 0 and 1, .* pass first_row=0"):
            imported(tmp_path, arrays, "safetensors", **options)


def test_resumed_files_lack_the_results_of_their_first_step(tmp_path: Path) -> None:
    arrays = {"W": series("W"), "g": series("grad"), "m": series("exp_avg_sq"),
              "starting_step": 100, "steps": KNOWN.steps + 100}  # fmt: skip
    arrays["m"][0] = 0.5
    ds, done = imported(tmp_path, arrays)
    assert same(ds, "grad", KNOWN.values["grad"])
    assert (ds.exp_avg.values[0] == 0.5).all()
    assert any("resumed at step 100" in note for note in done.notes)
    del arrays["steps"]
    ds, _ = imported(tmp_path, arrays)
    assert ds.step.values.tolist() == list(range(100, 106))
    del arrays["starting_step"]
    ds, done = imported(tmp_path, arrays | {"steps": KNOWN.steps + 100})
    assert (ds.grad.values[0] == 0).all()
    assert any("g of step 100, the first row, is 0 or NaN" in note for note in done.notes)


def test_a_mapped_array_keeps_the_alignment_and_the_place_of_its_kind(tmp_path: Path) -> None:
    """Also where only one of several arrays is mapped, and in runs with as many rows as runs."""
    arrays = {"W": series("W")[[0, 0, 1, 2, 3, 4]], "grads": series("grad")}
    arrays["mm"] = series("exp_avg")[[0, 0, 1, 2, 3, 4]]
    for options in ({"exp_avg": "mm"}, {"exp_avg": "mm", "W": "W"}):
        ds, _ = imported(tmp_path, arrays, layout="1.12a", map=options)
        for name in ("W", "exp_avg"):
            assert same(ds.isel(step=slice(5)), name, KNOWN.values[name][:5])
    rates = {"W": series("W"), "rates": np.full(6, 0.5, "f4"), "learning_rate": 0.1}
    ds, _ = imported(tmp_path, rates, map={"lr": "rates"}, first_row=1)
    assert ds.attrs["optimizer"]["hyperparameters"] == {"initial_lr": 0.1}
    W = series("W")[:2]
    runs: dict[str, Any] = {}
    for n in (0, 1):
        runs |= {f"run_{n}_W": W, f"run_{n}_lr": np.full(2, 1 + n, "f4")}
        runs |= {f"run_{n}_dead_mask": np.arange(7) == n}
    done = trajstore.import_file(
        write(tmp_path / "two", "npz", runs), tmp_path / "two.zarr", first_row=1
    )
    for number, one in enumerate((done, *done.others)):
        ds = trajstore.open_run(one.path)
        assert ds.lr.values.tolist() == [1 + number] * 2
        assert np.flatnonzero(ds.is_dead.values).tolist() == [number]
    toml = tmp_path / "x.toml"
    toml.write_text('[arrays]\nW = "W"\nx_loss = {variable = "loss", run = 1}')
    with pytest.raises(FormatError, match="x_loss belongs to run 1, of which the file holds no W"):
        imported(tmp_path, {"W": W, "x_loss": np.zeros(2, "f4")}, layout=str(toml))


def test_what_a_file_lacks_is_noted(tmp_path: Path) -> None:
    cells = {"cells": series("W", "uint16"), "dead_mask": KNOWN.dead}
    for arrays, note in (
        ({"delta": series("grad")}, "the file holds delta, but no initial W, hence no W"),
        (
            {"W": series("W"), "n_dead": 2, "live_tokens": 5},
            "the file does not label dead tokens, only their number (n_dead 2, live_tokens 5)",
        ),
        (cells, "the file holds cells (W rounded to bfloat16), but no W"),
    ):
        ds, done = imported(tmp_path, arrays)
        assert note in done.notes
    assert same(ds, "cells", KNOWN.values["W"])


def test_two_matrices_of_an_untied_model(tmp_path: Path) -> None:
    arrays = {"E": series("W"), "W": series("exp_avg_sq"), "grad_U": series("grad")}
    file = write(tmp_path / "file", "npz", arrays | {"loss": series("loss")})
    done = trajstore.import_file(file, tmp_path / "run.zarr")
    for one, name, key in ((done, "E", "W"), (*done.others, "W", "exp_avg_sq")):
        ds = trajstore.open_run(one.path).load()
        assert (one.path.name, ds.attrs["imported"]["run"]) == (f"run.{name}.zarr", name)
        assert same(ds, "W", KNOWN.values[key])
        assert same(ds, "loss", KNOWN.values["loss"])
        assert ("grad" in ds) == (name == "W")
    # If one target is taken, neither is written.
    shutil.rmtree(done.path)
    with pytest.raises(RunExists):
        trajstore.import_file(file, tmp_path / "run.zarr")
    assert not done.path.exists()


def test_masks_of_another_file_and_counts(tmp_path: Path) -> None:
    counts = np.where(KNOWN.dead, 0, 9)
    write(tmp_path / "counts", "npz", {"token_counts": counts})
    ds, done = imported(tmp_path, {"W": series("W")}, masks=tmp_path / "counts")
    assert (ds.is_dead.values == KNOWN.dead).all()
    assert (ds.token_count.values == counts).all()
    assert ds.attrs["imported"]["masks"] == "counts"
    assert any("token_counts of counts is 0" in note for note in done.notes)
    write(tmp_path / "other", "npz", {"dead_mask": ~KNOWN.dead})
    with pytest.raises(FormatError, match="dead_ids and dead_mask of other disagree"):
        imported(tmp_path, {"W": series("W"), "dead_ids": DEAD}, masks=tmp_path / "other")
    write(tmp_path / "other", "npz", {"arr_0": KNOWN.dead})
    with pytest.raises(FormatError, match="labels no tokens: found arr_0"):
        imported(tmp_path, {"W": series("W")}, masks=tmp_path / "other")


def test_token_ids_are_the_ids_of_the_rows(tmp_path: Path) -> None:
    ids = np.array([3, 1, 4, 15, 9, 2, 6])
    np.save(tmp_path / "token_ids.npy", ids)
    ds, _ = imported(tmp_path, {"W": series("W")}, masks=tmp_path / "token_ids.npy")
    assert ds.token.values.tolist() == ids.tolist()
    assert "is_dead" not in ds.coords
    assert same(ds, "W", KNOWN.values["W"])
    np.save(tmp_path / "token_ids.npy", ids[:3])
    with pytest.raises(FormatError, match=r"token_ids of token_ids\.npy has 3 ids, but W has 7"):
        imported(tmp_path, {"W": series("W")}, masks=tmp_path / "token_ids.npy")


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_go_to_the_configuration(tmp_path: Path, form: str) -> None:
    """Numbers, and arrays of one number; attributes, where the format has some."""
    plain = {
        "learning_rate": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8,
        "n_runs": 1, "init_scale": 0.02, "n_layers": 2, "motion_threshold": 0.1,
        "init_method_code": 1,
    }  # fmt: skip
    arrays = {"seed": np.array([42]), "learning_rate": np.array([1e-3], "f4")}
    arrays |= {"betas": np.array([0.9, 0.999], "f4"), "eps": np.array([1e-8], "f4")}
    given: list[dict[str, Any]] = [plain | arrays]
    if form != "npz":
        listed = {"seed": arrays["seed"] if form == "hdf5" else 42}
        given.append({"attributes": plain | listed})
    for each in given:
        attributes = each.pop("attributes", {})
        ds, _ = imported(tmp_path, {"W": series("W")} | each, form, attributes=attributes)
        rule = {"initial_lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
        assert ds.attrs["optimizer"] == {"hyperparameters": rule}
        assert ds.attrs["config"] == {
            "training": {"seed": 42}, "model": {"layers": 2},
            "scalars": {"motion_threshold": 0.1, "n_runs": 1},
            "initialization": {"sigma": 0.02, "dtype": "bfloat16"},
        }  # fmt: skip


def test_one_beta_alone_is_kept_under_its_name(tmp_path: Path) -> None:
    numbers = {"adam_beta2": 0.95, "learning_rate": 0.01, "seeds": np.arange(3)}
    ds, done = imported(tmp_path, {"W": series("W")} | numbers)
    assert ds.attrs["optimizer"]["hyperparameters"] == {"initial_lr": 0.01}
    assert ds.attrs["config"]["scalars"] == {"adam_beta2": 0.95}
    assert {line.name: line.kind for line in done.table}["seeds"] == ""  # of no run


OF_OTHER_BYTES = np.array([2, 0, 0, 0, 0, 0, 0], "u1").view(bool)
TWO = np.stack([series("W")] * 2)
WRONG: dict[str, dict[str, Any]] = {
    "g and grads both have names of grad": {"grads": series("grad")},
    r"m has shape .* W has shape \(6, 7, 3\)": {"m": series("exp_avg")[:, 1:]},
    "v has type int64": {"v": np.zeros((6, 7, 3), "i8")},
    "is read as dead_ids, expected whole": {"dead_ids": DEAD.astype("f4")},
    "holds values from 0 to 6": {"dead_mask": np.arange(7)},
    "dead_mask holds bytes other than": {"dead_mask": OF_OTHER_BYTES},
    "dead_mask means 5 tokens": {"dead_mask": KNOWN.dead[:5]},
    "but live_mask means 9": {"dead_mask": KNOWN.dead, "live_mask": np.zeros(9, bool)},
    "token ids from 0 to 6": {"dead_ids": np.array([1, 7])},
    r"has shape \(8388609,\)": {"dead_ids": np.zeros((8 << 20) + 1, "u1")},  # which is not read
    "token ids of at least 0": {"dead_ids": np.array([-1, 3])},
    "repeats an id": {"dead_ids": np.array([1, 1])},
    "dead_ids and live_ids disagree": {"dead_ids": DEAD, "live_ids": DEAD},
    "n_dead is 3, but dead_mask marks 2": {"dead_mask": KNOWN.dead, "n_dead": 3},
    "dead_mask and token_counts dis": {"dead_mask": KNOWN.dead, "token_counts": np.ones(7, int)},
    "hidden_dim is 4, but W": {"hidden_dim": 4},
    "W has a row of token 18": {"token_ids": np.arange(0, 21, 3), "vocab_size": 10},
    "one of 2 runs, but g has no": {"W": TWO},
    r"steps has shape \(9,\), .* W has 6": {"steps": np.arange(9)},
    "label the rows differently": {"steps": np.arange(6), "step": np.arange(6) * 2},
    "learning_rate has shape": {"learning_rate": np.ones(2, "f4")},
    "lr is 0.1 and learning_rate is 0.2": {"lr": 0.1, "learning_rate": 0.2},
    "without a length of 0": {"W": np.zeros((6, 0, 3), "f4"), "g": None},
    r"n_runs is 3, but W .* has 1": {"n_runs": 3},
    "num_trials is 2, but W": {"num_trials": np.array([2])},
    r"n_runs is 3, but .* 2 runs \(0, 1\)": {"run_0_W": TWO[0], "run_1_W": TWO[1], "n_runs": 3}
    | dict.fromkeys("Wg"),
    "seeds has 3 values, but W": {"W": TWO, "g": None, "seeds": np.arange(3)},
    "belongs to E or W, which are untied": {"E": series("W")},
}


@pytest.mark.parametrize("message", WRONG)
def test_contradictions_name_both(tmp_path: Path, message: str) -> None:
    arrays = {"W": series("W"), "g": series("grad")} | WRONG[message]
    with pytest.raises(FormatError, match=message):
        imported(tmp_path, {key: array for key, array in arrays.items() if array is not None})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_rows_of_dead_tokens_with_unknown_ids(tmp_path: Path) -> None:
    W = series("W")[:, DEAD]
    with pytest.raises(FormatError, match=r"with unknown ids; give .* masks="):
        imported(tmp_path, {"dead_W": W})
    write(tmp_path / "masks", "npz", {"untrained_mask": KNOWN.dead})
    ds, _ = imported(tmp_path, {"dead_W": W}, masks=tmp_path / "masks")
    assert ds.token.values.tolist() == DEAD.tolist()
    both = {"dead_W": W, "live_W": series("W")[:, ~KNOWN.dead], "dead_mask": KNOWN.dead}
    assert same(imported(tmp_path, both)[0], "W", KNOWN.values["W"])
    with pytest.raises(
        FormatError, match=r"disagree about 7 .* omit it with map={.ignore.: .dead_m"
    ):
        imported(tmp_path, {"W": series("W"), "dead_mask": ~KNOWN.dead}, masks=tmp_path / "masks")
    arrays = {"W": W, "dead_ids": DEAD, "dead_mask": KNOWN.dead}
    with pytest.raises(FormatError, match=r"dead_mask means 7 tokens, but W has 2 .* map="):
        imported(tmp_path, arrays)
    ds, _ = imported(tmp_path, arrays, map={"token": "dead_ids"})
    assert ds.token.values.tolist() == DEAD.tolist()
    assert ds.is_dead.values.all()
    places = {"W": W, "token": DEAD + 10, "dead_ids": np.arange(len(DEAD))}
    _, done = imported(tmp_path, places)
    assert "dead_ids lists no token of the rows" in done.notes


def test_no_name_has_two_roles() -> None:
    for table in (ARRAY_KINDS, SCALARS):
        for one, other in combinations(table.values(), 2):
            assert not set(one.names) & set(other.names), (one.name, other.name)


def test_every_variable_has_a_role_under_its_own_name() -> None:
    for name, entry in VARIABLES.items():
        known = named(name)
        is_native = name in (*MODEL, *EVERYTHING, *INTEGERS, *OF_EXAMPLES, "hyperparameters")
        expected = None if is_native else (name, entry.dims)  # other files have no such arrays
        assert (known and (known.kind.name, known.kind.dims)) == expected


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("embeddings_E", ("W", None, "E", "all")),
        ("lm_head.weight", ("W", None, "W", "all")),
        ("model_state_dict.transformer.wte.weight", ("W", None, "E", "all")),
        ("run3/grad_W_history", ("grad", 3, "W", "all")),
        ("untrained_deltas", ("delta", None, None, "dead")),
        ("V", ("exp_avg_sq", None, None, "all")),
        ("delta_W", ("delta", None, "W", "all")),
        ("Losses", ("loss", None, None, "all")),
        *(
            (key, None)
            for key in "h.0.attn.c_attn.weight bias foo delta_W_prime centroid dW".split()
        ),
    ],
)
def test_parsed_names(key: str, parsed: object) -> None:
    name = named(key)
    assert (name and (name.kind.name, name.run, name.matrix, name.tokens)) == parsed


@pytest.mark.parametrize("epoch", [1, 3, 4, 7, 10, 8306])
@pytest.mark.parametrize("steps", [11, 12, 10_000])
def test_callback_counts_become_steps(steps: int, epoch: int) -> None:
    """The counter also counts the end of each epoch."""
    labels = [0, *(step + (step - 1) // epoch for step in range(1, steps + 1))]
    found, note = true_steps(np.array(labels))
    assert found.tolist() == list(range(steps + 1))
    assert (note is None) == (epoch >= steps)


@pytest.mark.parametrize("labels", ["0123", "0246", "568", "01247", "01245789"], ids=str)
def test_other_labels_are_taken_as_they_are(labels: str) -> None:
    given = [int(digit) for digit in labels]
    found, note = true_steps(np.array(given))
    assert (found.tolist(), note) == (given, None)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0, 1], "f: at holds 0 after 0 in row 1"),
        ([2, 1], "f: at holds 1 after 2 in row 1"),
        ([-1, 0], "f: at holds -1 in row 0"),
        ([0, 1 << 62], "f: at holds 4611686018427387904 after 0 in row 1"),
        (np.array([0, (1 << 64) - 1], np.uint64), "18446744073709551615 after 0 in row 1"),
    ],
)
def test_impossible_labels_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        checked_labels("f", "at", np.array(labels))


W = KNOWN.values["W"]
FINE = (W * 1.2345).astype("f2")  # float16 that no bfloat16 holds
FINE[0] = 0


RECORDED = {
    "embeddings": series("W"), "grads": series("grad"), "variance": series("exp_avg_sq"),
    "logits": series("logits"), "losses": KNOWN.values["loss"] * 1.2345,
    "recorded_steps": KNOWN.steps, "dead_token_ids": DEAD,
    "live_token_ids": np.flatnonzero(~KNOWN.dead), "adam_beta1": np.float32(0.9),
    "adam_beta2": np.float32(0.999), "init_sigma": np.float32(1e-5), "init_method_code": 0,
}  # fmt: skip
"""A file of the recorder of 15.1a, without momentum and the learning rate."""


def test_an_import_adds_no_values(tmp_path: Path) -> None:
    ds, done = imported(tmp_path, RECORDED, "safetensors")
    assert set(ds.data_vars) == {"W", "grad", "exp_avg_sq", "logits", "loss"}
    assert set(ds.coords) == {"step", "token", "is_dead"}
    assert ds.is_dead.values.tolist() == KNOWN.dead.tolist()
    assert ds.attrs["optimizer"] == {"hyperparameters": {"betas": [0.9, 0.999]}}
    assert ds.attrs["config"] == {"initialization": {"sigma": 1e-5, "dtype": "float32"}}
    assert any("does not hold momentum" in note for note in done.notes)
    assert ds.attrs["imported"]["notes"] == list(done.notes)
    for name in ("grad", "logits", "loss"):
        assert np.isnan(ds[name].values[0]).all()
    assert (done.variables["grad"], done.variables["loss"]) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("14.1a", r"layout 14\.1a requires deltas"),
        ("native", "layout native requires step, token"),
        ("hdf5", "layout hdf5 is for hdf5 files"),
        ("15", "no layout '15'"),
    ],
)
def test_a_forced_layout_names_the_missing_keys(tmp_path: Path, layout: str, message: str) -> None:
    with pytest.raises((FormatError, InvalidArgument), match=message):
        imported(tmp_path, RECORDED, "safetensors", layout=layout)


def test_options_are_refused_for_a_native_file(tmp_path: Path) -> None:
    arrays = {"step": np.arange(2), "token": np.arange(3), "W": np.zeros((2, 3, 1), "f4")}
    save_file(arrays, tmp_path / "f", metadata={"format": "trajstore"})
    save_file({"dead_ids": np.array([1])}, tmp_path / "masks")
    options: dict[str, Any] = {"map": {"ignore": "W"}, "bits": "bfloat16", "first_row": 0}
    options |= {"labels": {"steps": "0:12"}, "masks": tmp_path / "masks"}
    named = "map, bits, labels, masks, first_row"
    with pytest.raises(InvalidArgument, match=f"layout native.* {named} would have no effect"):
        trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr", **options)
    assert not (tmp_path / "run.zarr").exists()
    trajstore.import_file(tmp_path / "f", tmp_path / "run.zarr")


def test_targets_and_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no file"):
        trajstore.import_file(tmp_path / "none", tmp_path / "run.zarr")
    whole = {"W": series("W"), "loss": series("loss")}
    file = write(tmp_path / "f", "npz", whole)
    trajstore.import_file(file, tmp_path / "run.zarr")
    with pytest.raises(RunExists, match="already exists"):
        trajstore.import_file(file, tmp_path / "run.zarr")
    write(file, "npz", {"W": series("W")})
    trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    # A failure leaves what was there as it was.
    write(file, "npz", whole)
    for name in ("run.zarr", "new.zarr"):
        with pytest.raises(KeyboardInterrupt):
            trajstore.import_file(file, tmp_path / name, overwrite=True, on_progress=interrupt)
    write(file, "npz", {"loss": series("loss")})
    with pytest.raises(FormatError):
        trajstore.import_file(file, tmp_path / "run.zarr", overwrite=True)
    assert "loss" not in trajstore.open_run(tmp_path / "run.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "run.zarr"]


def test_rows_and_memory_are_bounded_before_anything_is_read() -> None:
    file = Path("x.h5")
    check_size(file, "W", (1 << 22, 2, 2), "float32", 1 << 20)
    with pytest.raises(FormatError, match=r"W has 4,194,305 rows, .* at most 4,194,304"):
        check_size(file, "W", ((1 << 22) + 1, 2, 2), "float32", 1 << 20)
    with pytest.raises(InvalidArgument, match=r"rows of 4 MiB; .* memory='13MiB'"):
        check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 12 << 20)
    check_size(file, "W", (1, 1 << 10, 1 << 10), "float32", 13 << 20)


def test_what_would_be_far_larger_when_decompressed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    file.write_bytes(bytes(1 << 20))
    check_expansion(file, 1 << 30)
    with pytest.raises(FormatError, match=r"x\.npz has 1 MiB.* expand to 2 GiB.* without compress"):
        check_expansion(file, 2 << 30)
    file.write_bytes(bytes(11 << 20))
    check_expansion(file, 2 << 30)


def test_very_many_tiny_rows_are_few_blocks(tmp_path: Path) -> None:
    """They are float32, as the last value is not one of bfloat16, and all others are."""
    rows = np.random.default_rng(0).integers(-99, 99, (5_000, 32, 8)).astype("f4")
    rows[-1, -1, -1] = np.nextafter(np.float32(1), np.float32(2))
    np.savez(tmp_path / "x.npz", W=rows)
    done = trajstore.import_file(tmp_path / "x.npz", tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path)
    assert ds.attrs["block_rows"] == 2048
    assert (ds.W.values == rows).all()
    assert trajstore.verify(done.path).clean
    given = trajstore.import_file(tmp_path / "x.npz", tmp_path / "other.zarr", block_rows=64)
    assert trajstore.open_run(given.path).attrs["block_rows"] == 64


def test_a_note_says_which_variables_could_be_bits(tmp_path: Path) -> None:
    _, done = imported(tmp_path, {"W": W.astype("f2"), "v": FINE, "m": np.zeros_like(FINE)})
    (note,) = [note for note in done.notes if "bits=" in note]
    assert note.startswith("W, exp_avg: float16")
    assert "; bits={'W': 'bfloat16', 'exp_avg': 'bfloat16'} stores" in note
    for array, is_noted in ((W.astype("f2"), True), (FINE, False)):
        _, done = imported(tmp_path, {"W": array})
        assert any("; bits='bfloat16' stores" in note for note in done.notes) == is_noted
    ds, done = imported(tmp_path, {"W": W.astype("f2")}, bits="bfloat16")
    assert done.variables == {"W": "bfloat16"}
    assert any(note.startswith("W: float16 in the file, bfloat16 in") for note in done.notes)
    assert ds.W.values.tobytes() == W.astype("f2").astype("f4").tobytes()


def test_bits_in_one_array_and_numbers_in_another(tmp_path: Path) -> None:
    """Also numbers of bfloat16 whose type is float16."""
    bits = stored(W, "uint16").view("f2")
    arrays = {"W": bits, "m": FINE.view("u2"), "v": W, "g": stored(W, "float16")}
    arrays["g"][0] = 0
    ds, done = imported(tmp_path, arrays, bits={"m": "float16", "grad": "float16", "*": "bfloat16"})
    types = {name: ds[name].attrs["native_dtype"] for name in ds.data_vars}
    assert types == {
        "W": "bfloat16", "grad": "float16", "exp_avg": "float16", "exp_avg_sq": "bfloat16"
    }  # fmt: skip
    assert any("were read as bits of bfloat16" in note for note in done.notes)
    assert (ds.exp_avg.values == FINE.astype("f4")).all()
    assert (ds.W.values == W).all()


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ({"W": "bfloat16"}, "bits={'W': '…'} applies to uint16 and float16, but W is float32"),
        ({"loss": "bfloat16"}, "bits={'loss': '…'} .* but the file holds no loss"),
        ({"W": "float8"}, "got bits 'float8'"),
        # Of all, it would make other numbers of the second moment.
        ("bfloat16", "value of exp_avg is .* not every value of exp_avg_sq"),
    ],
)
def test_bits_of_other_types_are_refused(tmp_path: Path, bits: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        imported(tmp_path, {"W": W, "m": W.astype("f2"), "v": FINE}, bits=bits)
