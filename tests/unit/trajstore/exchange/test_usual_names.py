""""""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from grammar_files import FORMATS, imported, stored, truth

from trajstore.errors import FormatError
from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS, named
from trajstore.schema import EVERYTHING, INTEGERS, MODEL, OF_EXAMPLES, VARIABLES


def test_no_name_has_two_roles() -> None:
    for table in (ARRAY_KINDS, SCALARS):
        for one, other in combinations(table.values(), 2):
            assert not set(one.names) & set(other.names), (one.name, other.name)


def test_every_variable_has_a_role_under_its_own_name() -> None:
    for name, entry in VARIABLES.items():
        known = named(name)
        if name in (
            *MODEL,
            *EVERYTHING,
            *INTEGERS,
            *OF_EXAMPLES,
            "hyperparameters",
        ):  # only native files have them
            assert known is None
            continue
        assert known is not None
        assert (known.kind.name, known.kind.dims) == (name, entry.dims)


@pytest.mark.parametrize(
    ("key", "kind", "run", "matrix", "tokens"),
    [
        ("embedding_history", "W", None, None, "all"),
        ("embeddings_E", "W", None, "E", "all"),
        ("lm_head.weight", "W", None, "W", "all"),
        ("model_state_dict.transformer.wte.weight", "W", None, "E", "all"),
        ("run_12_momentum_W", "exp_avg", 12, "W", "all"),
        ("run3/grad_W_history", "grad", 3, "W", "all"),
        ("dead_grads", "grad", None, None, "dead"),
        ("untrained_deltas", "delta", None, None, "dead"),
        ("V", "exp_avg_sq", None, None, "all"),
        ("delta_W", "delta", None, "W", "all"),
        ("Losses", "loss", None, None, "all"),
        ("untrained_indices", "dead_ids", None, None, "all"),
    ],
)
def test_parsed_names(key: str, kind: str, run: object, matrix: object, tokens: str) -> None:
    name = named(key)
    assert name is not None
    assert (name.kind.name, name.run, name.tokens) == (kind, run, tokens)
    assert name.matrix == matrix


def test_unknown_names() -> None:
    for key in (
        "h.0.attn.c_attn.weight", "h.0.mlp.weight", "bias", "foo", "delta_W_prime", "centroid",
        "dW",
    ):  # fmt: skip
        assert named(key) is None


KNOWN = truth()
ARRAYS = {
    key: stored(KNOWN.values[name], "float32")
    for key, name in (("W", "W"), ("g", "grad"), ("m", "exp_avg"), ("v", "exp_avg_sq"))
}


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_in_arrays_of_one_value_and_pairs(tmp_path: Path, form: str) -> None:
    arrays = {
        "betas": np.array([0.9, 0.95], "f4"), "eps": np.array([1e-6], "f4"),
        "seed": np.array([7]), "learning_rate": np.array([0.01], "f4"), "threshold": np.array([3]),
        "n_runs": np.array([1]),
    }  # fmt: skip
    ds, _ = imported(tmp_path, ARRAYS | arrays, form)
    rule = ds.attrs["optimizer"]["hyperparameters"]
    assert rule["betas"] == [0.9, 0.95]
    assert (rule["eps"], rule["initial_lr"]) == (1e-6, 0.01)
    assert ds.attrs["config"]["training"]["seed"] == 7
    assert ds.attrs["config"]["scalars"]["threshold"] == 3


def test_one_beta_alone_is_kept_under_its_name(tmp_path: Path) -> None:
    ds, _ = imported(tmp_path, ARRAYS | {"adam_beta2": 0.95, "learning_rate": 0.01})
    assert ds.attrs["optimizer"]["hyperparameters"] == {"initial_lr": 0.01}
    assert ds.attrs["config"]["scalars"] == {"adam_beta2": 0.95}


def test_contradicting_numbers_of_runs(tmp_path: Path) -> None:
    W = ARRAYS["W"]
    for arrays, message in (
        ({"W": W, "n_runs": 3}, r"n_runs is 3, but W of shape \(6, 7, 3\) has 1"),
        ({"W": W, "num_trials": np.array([2])}, "num_trials is 2, but W"),
        ({"run_0_W": W, "run_1_W": W, "n_runs": 3}, r"n_runs is 3, but .* 2 runs \(0, 1\)"),
        ({"W": np.stack([W] * 2), "seeds": np.arange(3)}, "seeds has 3 values, but W of shape"),
    ):
        with pytest.raises(FormatError, match=message):
            imported(tmp_path, arrays)
    _, done = imported(tmp_path, {"W": W, "seeds": np.arange(3)})
    assert {line.name: line.kind for line in done.table}["seeds"] == ""
