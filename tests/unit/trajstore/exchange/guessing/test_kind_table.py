from __future__ import annotations

from itertools import combinations

import pytest

from trajstore.exchange.guessing.kind_table import (
    AMBIGUOUS,
    ARRAY_KINDS,
    SCALARS,
    described_population,
    is_derived,
    named,
)
from trajstore.schema import EVERYTHING, MODEL, OF_EXAMPLES, VARIABLES


def test_no_name_has_two_roles() -> None:
    for table in (ARRAY_KINDS, SCALARS):
        for one, other in combinations(table.values(), 2):
            assert not set(one.names) & set(other.names), (one.name, other.name)
    assert not set(AMBIGUOUS) & {name for kind in ARRAY_KINDS.values() for name in kind.names}


def test_every_variable_has_a_role_under_its_own_name() -> None:
    for name, entry in VARIABLES.items():
        kind = named(name).kind
        if name in (*MODEL, *EVERYTHING, *OF_EXAMPLES):  # only native files have them
            assert kind is None
            continue
        assert kind is not None
        assert (kind.name, kind.dims) == (name, entry.dims)
        assert not is_derived(name)


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


def test_unknown_and_derived_names() -> None:
    derived = ("delta_W_prime", "centroid", "last_motion_step", "L1_history", "Linf_history")
    assert all(map(is_derived, derived))
    for key in ("h.0.attn.c_attn.weight", "h.0.mlp.weight", "bias", "foo", *derived[:2]):
        assert named(key).kind is None


def test_descriptions_of_lists() -> None:
    assert described_population("ids of dead tokens") == "dead"
    assert described_population("Trained token ids") == "live"
    assert described_population("untrained and trained") is None
    assert described_population("of the vocabulary") is None

    for text in (
        "tokens not seen during training", "tokens never seen", "Trained on Gatsby", "dead weight",
        "ids of a tokenizer trained on Gatsby", "non-trained tokens", "tokens that aren't dead",
        "un-trained token ids", "token ids, untrained and trained",
    ):  # fmt: skip
        assert described_population(text) is None, text
