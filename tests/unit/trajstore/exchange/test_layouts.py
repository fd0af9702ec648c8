"""What the notebooks' files hold, row by row, against a run that is known."""

from __future__ import annotations

import re
import tomllib
import zlib
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from bits_and_calls import nightly_but
from exchange_runs import ALL, write_run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import trajstore
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.exchange import layouts
from trajstore.exchange.import_file import preview_import
from trajstore.exchange.layouts import LAYOUTS, MASKS, NAMES, as_toml, layout_of
from trajstore.exchange.usual_names import named

ROOT = Path(__file__).parents[4]
ROWS, TOKENS = 11, 7
DEAD, LIVE = [0, 3, 6], [1, 2, 4, 5]
CONFIG = {
    "model": {"vocab_size": TOKENS, "hidden": 3, "layers": 2, "heads": 1},
    "training": {"steps": 10, "batch_size": 32},
}
RULE = {"lr": 0.0, "initial_lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01, "eps": 1e-8}
NUMBERS = {
    "learning_rate": 1e-3, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "n_dead": 3, "n_untrained": 3, "n_live": 4, "n_trained": 4,
    "vocab_size": TOKENS, "hidden_dim": 3, "n_layers": 2, "n_heads": 1, "batch_size": 32,
    "init_method_code": 0, "base_seed": 42, "base_train_seed": 42, "init_seed": 42,
    "init_sigma": 0.01, "init_scale": 0.01, "seed": 42, "tied_weights": False,
}  # fmt: skip
"""Numbers of the runs below; several runs differ in the last ones."""

Known = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Known]:
    """Runs and their values. The second one has another seed, the others also other values.

    The third has another initial scale. In all of them, tokens 3 and 4 move last in step 5, and
    token 6 never does.
    """
    folder, made = tmp_path_factory.mktemp("runs"), []
    differing = zip("abcd", (42, 43, 43, 43), (0.01, 0.01, 0.02, 0.01), (0, 0, 1, 1), strict=True)
    for name, seed, scale, values in differing:
        initial = {"kind": "point", "sigma": scale, "seed": 42}
        changed = {"training": CONFIG["training"] | {"seed": seed}, "initialization": initial}
        bits = write_run(
            folder / name, ALL | {"hidden_mean": "float32"}, rows=ROWS, tokens=TOKENS, hidden=3,
            seed=values, config=CONFIG | changed, still={3: 5, 4: 5, 6: 0},
            attributes={"optimizer": {"hyperparameters": RULE}},
        )  # fmt: skip
        floats = {
            key: array.view("f4" if array.itemsize == 4 else ml_dtypes.bfloat16).astype("f4")
            for key, array in bits.items()
        }
        made.append((folder / name, floats))
    return made


@pytest.fixture(scope="module")
def run(runs: list[Known]) -> Known:
    return runs[0]


def loaded(path: Path) -> dict[str, Any]:
    """Arrays, and the numbers of HDF5."""
    if path.read_bytes()[:4] != b"\x89HDF":
        return dict(load_file(path))
    with h5py.File(path) as f:
        return {key: each[()] for key, each in f.items()} | dict(f.attrs)


KINDS = {
    key: name
    for name, keys in {
        "grad": "g grads grad_W", "exp_avg": "m momentum momentum_W", "hidden_mean": "h_mean",
        "exp_avg_sq": "v variance variance_W", "loss": "loss losses", "logits": "logits",
    }.items()
    for key in keys.split()
}  # fmt: skip
"""The others are of W."""

ONLY_DEAD = ("14.1a-dead", "thimble-8", "thimble-9", "crucible-1", "crucible-2")


def reference(
    layout: str, key: str, values: dict[str, np.ndarray], steps: list[int], tokens: list[int]
) -> np.ndarray:
    """Values of an array of a file, by its name and by what is special about its notebook."""
    population, _, rest = key.partition("_")
    key = rest if population in ("dead", "live") else key
    population = "dead" if layout in ONLY_DEAD else population
    if population in ("dead", "live"):
        tokens = [token for token in tokens if (token in DEAD) == (population == "dead")]
    is_crucible = layout.startswith("crucible")
    without_first = ("delta_W_prime", "h_mean", "g") if is_crucible else ()
    if key in without_first or (layout, key) == ("goldilocks", "losses"):
        steps = steps[1:]
    array = values[KINDS.get(key, "W")]
    array = array if key in ("loss", "losses", "h_mean") else array[:, tokens]
    rows, before = array[steps], array[[max(step - 1, 0) for step in steps]]
    if key == "W_initial":
        return array[0]
    if key == "deltas":
        return rows - before
    if key == "delta_W_prime":
        return (rows - before) / 2.0 ** (np.floor(np.log2(np.abs(before))) - 7)
    if key == "centroid":
        return rows.mean(1, dtype="f8").astype("f4")
    if key == "last_motion_step":
        moved = (rows[1:] != rows[:-1]).any(-1)
        each = (np.array(steps[1:])[at] for at in moved.T)
        return np.array([max(its.tolist(), default=-1) for its in each], "i4")
    if layout == "1.12a" and key in ("W", "momentum", "variance"):
        return before
    keeps_nan = key == "losses" or (is_crucible and key == "loss")
    keeps_nan |= (layout, key) in (("1.12a", "logits"), ("marble-1", "h_mean"))
    return rows if keeps_nan else np.nan_to_num(rows)


def assert_equal(array: np.ndarray, expected: np.ndarray) -> None:
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16)
    rounded = expected.astype(array.dtype).astype("f8")
    assert np.array_equal(array.astype("f8"), rounded, equal_nan=True)


THEIR_FILES = tomllib.loads((ROOT / "tests" / "data" / "notebook_files.toml").read_text())["files"]


def forms_of(layout: str) -> dict[str, str]:
    """Type and rank of each array in the files of the notebooks with this layout."""
    for files in THEIR_FILES:
        if layout in {NAMES[name] for name in files["notebooks"]}:
            return {key: form for form, keys in files["arrays"].items() for key in keys}
    return {}


SELECTIONS: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({}, [*range(ROWS)], [*range(TOKENS)]),
    ({"tokens": [1, 3, 4, 6], "steps": "3,7:10"}, [3, 7, 8, 9], [1, 3, 4, 6]),
]
CHOSEN = {"flannel-5": [1, 2], "flannel-6": [0, 1], "flannel-7": [1, 3]}
"""Runs that one file holds, by what they have in common: a seed, the initial W."""


QUICK = (
    "14.1a-split", "15.1a", "1.12a", "flannel-2", "flannel-3", "flannel-5", "flannel-7",
    "thimble-6", "thimble-7", "crucible-2",
)  # fmt: skip
"""One layout for each way in which they differ."""


def key_of(layout: str, key: str, at: int) -> str:
    """Key of an array of one of several runs."""
    runs = LAYOUTS[layout].runs
    return {"keys": f"run_{at}_{key}", "matrices": f"{key}_{'EW'[at]}"}.get(str(runs), key)


@pytest.mark.parametrize(
    "name", nightly_but([name for name, one in LAYOUTS.items() if one.columns], *QUICK)
)
def test_every_layout_goes_out_and_comes_back(runs: list[Known], tmp_path: Path, name: str) -> None:
    """Also from a file of a notebook, which does not name its layout."""
    layout = LAYOUTS[name]
    chosen = [runs[at] for at in CHOSEN.get(name, [0, 3] if layout.runs else [0])]
    for number, (selection, selected, tokens) in enumerate(SELECTIONS):
        # The first row of 14.1a-split is step 1.
        steps = [step for step in selected if step or name != "14.1a-split"]
        paths = [path for path, _ in chosen]
        done = trajstore.export(paths, tmp_path / f"{number}", layout=name, **selection)
        assert done.rows == len(steps)
        assert done.tokens == len({*tokens} & {*DEAD} if name in ONLY_DEAD else tokens)
        file = loaded(tmp_path / f"{number}")
        for at, (_, values) in enumerate(chosen):
            for column in layout.columns:
                key = key_of(name, column.key, at)
                if key in file or at == 0:  # not a second time for both matrices
                    array = file.get(key, file.get(column.key))
                    is_shared = (name, key) == ("flannel-6", "W_initial")
                    array = array[at] if layout.runs == "axis" and not is_shared else array
                    assert_equal(array, reference(name, column.key, values, steps, tokens))
        label = f"{'run_0_' if layout.runs == 'keys' else ''}{layout.steps or 'recorded_steps'}"
        assert file.get(label, np.arange(len(steps))).tolist() == steps
        # Masks and lists are of the places of the tokens, or of a whole vocabulary.
        places = [*range(TOKENS)] if name in ONLY_DEAD else tokens
        for key in layout.marks:
            is_dead = "dead" in key or "untrained" in key
            mask = [(token in DEAD) == is_dead and token in tokens for token in places]
            listed = mask if key.endswith("mask") else np.flatnonzero(mask).tolist()
            assert file[key].tolist() == listed, key
        if name not in ONLY_DEAD:
            assert file.get("token", np.arange(TOKENS)).tolist() == tokens
    file = loaded(tmp_path / "0")
    for key in {*layout.numbers} & {*NUMBERS} & {*file}:
        assert file[key] == np.asarray(NUMBERS[key], file[key].dtype), key
    assert preview_import(tmp_path / "0").layout == name
    theirs, found = tmp_path / "0", {name}
    expected = forms_of(name)
    if expected:
        file = {key: each for key, each in file.items() if each.dtype.kind != "S"}
        forms = {key: f"{each.dtype} {each.ndim}" for key, each in file.items()}
        if name in ("flannel-4", "flannel-5"):  # their files hold W and losses alone
            forms = {key: form for key, form in forms.items() if key in expected}
        if name == "flannel-7":  # whose runs began at one W
            forms["W_initial"] = expected["W_initial"]
        if layout.format == "hdf5":  # whose attributes have other types
            forms |= {key: expected[key] for key in forms if forms[key].endswith(" 0")}
        else:
            theirs = tmp_path / "theirs"
            save_file(file, theirs)
        assert forms == expected
        # The usual names suffice for several runs by their keys.
        found |= {"safetensors"} if layout.runs in ("keys", "matrices") else set()
    back = trajstore.import_file(theirs, tmp_path / "back.zarr")
    assert back.layout in found
    if name == "1.12a":  # whose last row has no states
        return
    copies = [one.path for one in (back, *back.others)]
    trajstore.export(copies, tmp_path / "again", layout=name)
    again = loaded(tmp_path / "again")
    columns = [key_of(name, column.key, at) for column in layout.columns for at in (0, 1)]
    marks = () if name in ONLY_DEAD else layout.marks
    for key in {*columns, *marks, layout.steps} & {*file}:
        assert file[key].tobytes() == again[key].tobytes(), key


def test_what_a_run_or_a_layout_lacks_is_reported(runs: list[Known], tmp_path: Path) -> None:
    ds, two = trajstore.open_run(runs[0][0]), [runs[0][0], runs[2][0]]
    bare = ds[["W", "loss", "hidden_mean"]].drop_vars(["is_dead", "token_count", "token_text"])
    bare.attrs = {}
    done = trajstore.export(bare, tmp_path / "f", layout="1.12f")
    assert set(load_file(tmp_path / "f")) == {"recorded_steps", "embeddings", "losses"}
    assert done.variables == ("W", "loss")
    for note in (
        "grads, momentum, variance, logits omitted: the run does not record grad, exp_avg, "
        "exp_avg_sq, logits",
        "hidden_mean omitted: not part of layout 1.12f",
        "n_trained, n_untrained omitted: the run does not record which tokens are dead",
        "init_scale, learning_rate, weight_decay, adam_beta1, adam_beta2 omitted: not in the run",
    ):
        assert any(each.startswith(note) for each in done.notes), note
    unlabeled = ds.drop_vars("token_count")
    unlabeled.W.attrs["native_dtype"] = "float32"
    for number, (source, layout, variables, note) in enumerate((
        (ds, "15.1a", None, "hidden_mean, token_count, token_text omitted: not part of layout"),
        (ds, "08.2a", "W", "is_dead, token_count, token_text omitted: not part of layout 08"),
        (ds, "14.1a", "grad", "deltas omitted: not selected"),
        (unlabeled, "token-counts", None, "token_occurrence_counts omitted: the run has no counts"),
        (unlabeled, "crucible-2", None, "delta_W_prime counts spacings of float32, the type of W"),
        (two, "flannel-5", None, "fixed_seed omitted: the runs differ"),
        (two, "flannel-3", None, "init_scale omitted: the runs differ"),
    )):  # fmt: skip
        done = trajstore.export(source, tmp_path / f"{number}", layout=layout, variables=variables)
        assert any(each.startswith(note) for each in done.notes), done.notes
    cells = reference("crucible-2", "delta_W_prime", runs[0][1], [*range(ROWS)], [*range(TOKENS)])
    assert_equal(load_file(tmp_path / "4")["delta_W_prime"], cells * 2**16)
    both = load_file(tmp_path / "5")
    assert both["init_scales"].tolist() == np.array([0.01, 0.02], "f4").tolist()
    assert (both["n_runs"], both["n_steps"], both["recorded_grads"]) == (2, 10, True)
    trajstore.export(two[:1], tmp_path / "one", layout="flannel-5", variables="W,loss")
    one = load_file(tmp_path / "one")
    assert (one["fixed_seed"], one["recorded_grads"]) == (42, False)


def test_float32_weights_are_rounded_only_audibly(tmp_path: Path) -> None:
    bits = write_run(
        tmp_path / "run.zarr", dict.fromkeys(ALL, "float32"), rows=5, tokens=50, hidden=2
    )
    done = trajstore.export(tmp_path / "run.zarr", tmp_path / "f", layout="1.12f")
    W = bits["W"].view("f4")
    rounded = W.astype(ml_dtypes.bfloat16)
    assert (load_file(tmp_path / "f")["embeddings"] == rounded).all()
    changed = np.count_nonzero(rounded.astype("f4") != W)
    assert any(note.startswith(f"{changed} values of embeddings") for note in done.notes)
    trajstore.export(tmp_path / "run.zarr", tmp_path / "g", layout="crucible-1")
    exact = W[:, ::3].mean(1, dtype="f8").astype("f4")
    assert (load_file(tmp_path / "g")["centroid"] == exact).all()


def test_chunks_and_attributes_of_hdf5(run: Known, tmp_path: Path) -> None:
    for layout, rows, gzip in (
        ("native", 1, None), ("thimble-6", 1, "gzip"), ("thimble-7", ROWS, None)
    ):  # fmt: skip
        trajstore.export(run[0], tmp_path / layout, layout=layout, format="hdf5")
        with h5py.File(tmp_path / layout) as f:
            assert (f["W"].chunks, f["W"].compression) == ((rows, TOKENS, 3), gzip)
    with h5py.File(tmp_path / "native") as f:
        numbers = [f.attrs[key] for key in ("num_steps", "n_dead", "vocab_size", "seed")]
        assert numbers == [ROWS - 1, len(DEAD), TOKENS, 42]
        assert f["W"].attrs["native_dtype"] == b"bfloat16"
        assert_equal(f["W"][:], run[1]["W"])
        assert np.flatnonzero(f["dead_mask"]).tolist() == f["dead_ids"][:].tolist() == DEAD


def test_compressed_rows_are_equal_under_every_budget(run: Known, tmp_path: Path) -> None:
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
    file, every = loaded(tmp_path / "f"), ([*range(ROWS)], [*range(TOKENS)])
    for key, like in {"W": "W", "g": "g", "first": "W_initial", "centroid": "centroid"}.items():
        assert_equal(file[key], reference("crucible-2-all", like, values, *every))
    with h5py.File(tmp_path / "f") as f:
        assert f["W"].chunks == (3, TOKENS, 3)
        rows = (values["W"][3:6].view("u4") >> 16).astype("u2").tobytes()
        assert f["W"].id.read_direct_chunk((3, 0, 0))[1] == zlib.compress(rows, 1)
    with pytest.raises(InvalidArgument, match=r"120 B does not hold a chunk of W, 126 B; raise it"):
        trajstore.export(path, tmp_path / "g", layout=str(own), memory=120)
    assert not (tmp_path / "g").exists()


def test_numbers_and_texts_fit_the_rows(run: Known, tmp_path: Path) -> None:
    """With the configuration of the run, without one, and with one that announces other steps."""
    ds = trajstore.open_run(run[0])
    for config in (ds.attrs["config"], {}, {"training": {"steps": 10_000}}):
        ds.attrs["config"] = config
        trajstore.export(ds, tmp_path / "f", layout="thimble-4", steps="::5", overwrite=True)
        file = load_file(tmp_path / "f")
        assert (file["num_steps"], file["vocab_size"], file["hidden_dim"]) == (2, TOKENS, 3)
        done = trajstore.export(ds, tmp_path / "g", layout="1.12a", steps=":7", overwrite=True)
        assert any("does not hold those after step 6" in note for note in done.notes)
        with safe_open(tmp_path / "g", "np") as opened:
            metadata = opened.metadata()
        expected = {"model": "GPT2", "vocab_size": "7", "hidden_dim": "3", "n_steps": "6"}
        expected |= {"final_loss": str(float(run[1]["loss"][-1])), "learning_rate": "0.001"}
        if "model" in config:
            expected |= {"n_layers": "2", "n_heads": "1", "batch_size": "32"}
        assert expected.items() <= metadata.items()


def test_matrices_are_ordered_by_their_names(runs: list[Known], tmp_path: Path) -> None:
    both = [trajstore.open_run(runs[at][0]) for at in (0, 2)]
    for ds, name in zip(both, ("lm_head.weight", "wte.weight"), strict=True):
        ds.attrs["recording"] = {"parameter": name}
    trajstore.export(both, tmp_path / "f", layout="flannel-2")
    for matrix, at in (("E", 2), ("W", 0)):
        assert_equal(load_file(tmp_path / "f")[f"embeddings_{matrix}"], runs[at][1]["W"])
    with pytest.raises(InvalidArgument, match=r"got the runs of wte\.weight and wte\.weight"):
        trajstore.export(both[1:] * 2, tmp_path / "g", layout="flannel-2")


def test_what_does_not_fit_one_file_is_refused(run: Known, tmp_path: Path) -> None:
    a = trajstore.open_run(run[0])
    few, later, bare = a.isel(step=[0, 8]), a.isel(step=[3]), a[["W", "loss"]].drop_vars("is_dead")
    for layout, chosen, message in (
        ("15.1a", [a, a], "got 2 runs, expected one for layout 15.1a"),
        ("native", [a, a], "got 2 runs, expected one"),
        ("native", [], "got 0 runs, expected one"),
        ("flannel-2", [a], "got 1 runs, expected the run of E, then that of W"),
        ("flannel-5", [a, a.isel(step=slice(4))], "run 1 has 4 rows"),
        ("flannel-3", [a, a.isel(token=slice(6))], "token of run 1 differs"),
        ("flannel-5", [a, a.isel(hidden=slice(2))], r"W of run 1 has shape \(11, 7, 2\)"),
        # A row that is not there is not made up.
        ("1.12a", few, "1.12a needs W of step 7, which the"),
        ("14.1a", few, "14.1a needs W of step 7, which the"),
        ("flannel-7", later, "flannel-7 needs W of step 0, which the"),
        ("thimble-8", bare, "has rows of dead tokens"),
        ("14.1a", a[["logits", "loss"]], "but the selection has logits, loss"),
        ("dead-mask", bare, "dead-mask holds masks only"),
    ):
        with pytest.raises((InvalidArgument, VariableNotRecorded), match=message):
            trajstore.export(chosen, tmp_path / "f", layout=layout)
    assert not (tmp_path / "f").exists()


def test_masks_label_the_tokens_of_an_import(run: Known, tmp_path: Path) -> None:
    path, _ = run
    trajstore.export(path, tmp_path / "f", layout="08.2a")
    for layout in MASKS:
        masks = tmp_path / f"masks_{layout}"
        done = trajstore.export(path, masks, layout=layout)
        assert (done.rows, done.notes) == (0, ())
        if not LAYOUTS[layout].only:
            (note,) = trajstore.export(path, tmp_path / layout, layout=layout, tokens=DEAD).notes
            assert f"of the {len(DEAD)} tokens of the export only" in note
        file = load_file(masks)
        assert {*file} == {*LAYOUTS[layout].marks, *LAYOUTS[layout].numbers}
        if layout == "token-counts":
            counts = trajstore.open_run(path).token_count.values
            assert file["token_occurrence_counts"].tolist() == counts.tolist()
        trajstore.import_file(tmp_path / "f", tmp_path / "back", masks=masks, overwrite=True)
        ds = trajstore.open_run(tmp_path / "back")
        assert ds.token.values[ds.is_dead.values].tolist() == DEAD, layout


OWN = """
like = "thimble-8"
steps = "t"
marks = ["dead_indices", "live_mask"]
numbers = ["n_dead", "lr", "adam_eps"]
[arrays]
W = false
g = false
v = false
m = {variable = "exp_avg", tokens = "live"}
weights = {variable = "W", type = "bfloat16", bits = true, tokens = "all"}
velocity = {variable = "W", time = "change", first_row = 1}
slope = {variable = "grad", first_row = 1}
deltas = {variable = "W", time = "ulps", tokens = "all"}
"""


def test_a_layout_of_a_toml_file(run: Known, tmp_path: Path) -> None:
    path, values = run
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    done = trajstore.export(path, tmp_path / "f", layout=str(own), steps="3:")
    assert done.notes[-1] == "velocity, slope begin with the row after step 3"
    file, steps, every = load_file(tmp_path / "f"), [*range(3, ROWS)], [*range(TOKENS)]
    assert file["t"].tolist() == steps
    assert {*file} == {"t", "weights", "velocity", "slope", "dead_indices", "live_mask", "n_dead",
                       "lr", "adam_eps", "m", "loss", "deltas"}  # fmt: skip
    for key, like, some, tokens in (
        ("m", "m", steps, LIVE),  # it replaces that of thimble-8
        ("loss", "loss", steps, every),  # it is that of thimble-8
        ("weights", "W", steps, every),
        ("velocity", "deltas", steps[1:], DEAD),
        ("slope", "grads", steps[1:], DEAD),
        ("deltas", "delta_W_prime", [2, *steps], every),
    ):
        layout = "crucible" if key == "deltas" else "own"
        assert_equal(file[key], reference(layout, like, values, some, tokens))
    trajstore.export(path, tmp_path / "one", layout=str(own), steps="0")
    assert load_file(tmp_path / "one")["slope"].shape == (0, len(DEAD), 3)
    own = tmp_path / "w.toml"
    own.write_text(
        'arrays.x = "W"\narrays.y = "loss"\n'
        'arrays.deltas = {variable = "W", time = "ulps", type = "float32"}'
    )
    trajstore.export(path, tmp_path / "g", layout=str(own))
    back = trajstore.import_file(tmp_path / "g", tmp_path / "b.zarr", layout=str(own))
    assert ("deltas", "derived from other arrays") in {(line.name, line.why) for line in back.table}
    ds = trajstore.open_run(back.path)
    assert {*ds.data_vars} == {"W", "loss"}
    assert (ds.W.values == values["W"]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrays = \n", "is not valid TOML: .*line 1"),
        ('step = "x"', "no key 'step' .did you mean 'steps'"),
        ("numbers = []", "got no arrays"),
        ("marks = 5", "got marks=5"),
        ('like = "dead-mask"\n[arrays]\nW = false', "has no 'W'"),
        ('steps = "0:3"\narrays.W = "W"', "got steps = '0:3'"),
        ('marks = ["dead"]', "there is no mark 'dead'"),
        ('marks = "dead_mask"', "got marks='dead_mask'"),
        ('marks = ["token_ids"]', "say of which: tokens = "),
        ('numbers = ["size"]\narrays.W = "W"', "there is no number 'size'"),
        ('arrays.W = "w"', "no variable 'w' .did you mean 'W'"),
        ("arrays.W = {first_row = 1}", "got no variable"),
        ('arrays.W = {variable = "W", type = "float32", bits = true}', "a type of 16 bits"),
        ('arrays.W = {variable = "W", time = "ulps"}', "expected W in float32"),
        ('chunk_rows = 0\narrays.W = "W"', "got chunk_rows=0"),
        ('steps = 3\narrays.W = "W"', "got steps=3"),
        ('bits = "yes"\narrays.W = "W"', "arrays.W: got bits='yes'"),
        ('format = "hdf5"\nruns = "axis"\narrays.W = "W"', "is for safetensors"),
        ('like = "crucible-1"\narrays.centroids = false', r"'centroids' .did you mean 'centroid'"),
        ('steps = "W"\narrays.W = "W"', "has 'W' twice"),
        ('format = "hdf5"\nnumbers = ["n_dead"]\narrays.n_dead = "loss"', "has 'n_dead' twice"),
    ],
)
def test_a_wrong_toml_file_is_named(run: Known, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InvalidArgument, match=rf"own\.toml.*{message}"):
        trajstore.export(run[0], tmp_path / "f", layout=str(tmp_path / "own.toml"))


def test_the_table_of_layouts(tmp_path: Path) -> None:
    """It agrees with that of kinds, and, printed as TOML, says the same arrays.

    Each layout has a line of comment before its table, which the appendix of the documentation
    shows: it names the files. Notebooks of one kind of files have one layout.
    """
    for name, layout in LAYOUTS.items():
        for column in layout.columns:
            known = named(column.key)
            assert (known and known.kind.name) == column.kind, column.key
        (tmp_path / "own.toml").write_text(as_toml(layout))
        assert layout_of(str(tmp_path / "own.toml")).arrays == layout.arrays, name
    text = (Path(layouts.__file__).with_name("layouts.toml")).read_text("utf-8")
    assert {*LAYOUTS} - {*re.findall(r'^# .+\.\n\["(.+?)"\]$', text, re.MULTILINE)} == set()
    for files in THEIR_FILES:
        assert len({NAMES[name] for name in files["notebooks"]}) == 1, files["notebooks"]


def test_sgd_has_moments_of_zero_as_their_files_had(run: Known, tmp_path: Path) -> None:
    ds = trajstore.open_run(run[0]).drop_vars(["exp_avg", "exp_avg_sq"])
    optimizer = {"class": "torch.optim.sgd.SGD", "hyperparameters": {"lr": 0.1, "momentum": 0.0}}
    ds.attrs |= {"optimizer": optimizer, "config": {"initialization": {"dtype": "bfloat16"}}}
    done = trajstore.export(ds, tmp_path / "f", layout="15.1a")
    file = load_file(tmp_path / "f")
    for key in ("momentum", "variance"):
        assert_equal(file[key], np.zeros((ROWS, TOKENS, 3)))
    assert file["adam_beta1"] == file["adam_beta2"] == 0
    assert file["init_method_code"] == 1
    assert any("momentum, variance are 0: SGD has no moments" in note for note in done.notes)
