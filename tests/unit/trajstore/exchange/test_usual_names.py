from __future__ import annotations

from itertools import combinations

import pytest

from trajstore.exchange.usual_names import ARRAY_KINDS, SCALARS, named
from trajstore.schema import EVERYTHING, MODEL, OF_EXAMPLES, VARIABLES


def test_no_name_has_two_roles() -> None:
    for table in (ARRAY_KINDS, SCALARS):
        for one, other in combinations(table.values(), 2):
            assert not set(one.names) & set(other.names), (one.name, other.name)


def test_every_variable_has_a_role_under_its_own_name() -> None:
    for name, entry in VARIABLES.items():
        kind = named(name).kind
        if name in (*MODEL, *EVERYTHING, *OF_EXAMPLES):  # only native files have them
            assert kind is None
            continue
        assert kind is not None
        assert (kind.name, kind.dims) == (name, entry.dims)


@pytest.mark.parametrize(
    ("key", "kind", "run", "matrix", "population"),
    [
        ("embedding_history", "W", None, None, None),
        ("embeddings_E", "W", None, "E", None),
        ("lm_head.weight", "W", None, "W", None),
        ("model_state_dict.transformer.wte.weight", "W", None, "E", None),
        ("run_12_momentum_W", "exp_avg", 12, "W", None),
        ("run3/grad_W_history", "grad", 3, "W", None),
        ("dead_grads", "grad", None, None, "dead"),
        ("untrained_deltas", "delta", None, None, "dead"),
        ("V", "exp_avg_sq", None, None, None),
        ("delta_W", "delta", None, "W", None),
        ("Losses", "loss", None, None, None),
        ("untrained_indices", "dead_ids", None, None, None),
    ],
)
def test_parsed_names(key: str, kind: str, run: object, matrix: object, population: str) -> None:
    name = named(key)
    assert name.kind is not None
    assert (name.kind.name, name.run, name.population) == (kind, run, population)
    assert name.matrix == matrix


def test_unknown_names() -> None:
    for key in (
        "h.0.attn.c_attn.weight", "h.0.mlp.weight", "bias", "foo", "delta_W_prime", "centroid",
        "dW",
    ):  # fmt: skip
        assert named(key).kind is None
