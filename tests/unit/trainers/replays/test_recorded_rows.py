"""What the values of one row say of each other."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from altered_runs import flip, flipped  # noqa: E402
from trainings import scaled_run, tiny_run  # noqa: E402

from trajstore.trainers import replay  # noqa: E402

pytestmark = pytest.mark.torch

SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.zarr"
    return tiny_run(path, dtype=torch.bfloat16, steps=9, variables=("matrix", "cells", *SUMMARIES))


@pytest.mark.parametrize("name", [*SUMMARIES, "cells"])
def test_derived_arrays_are_compared_with_their_source(name: str, recorded: Path) -> None:
    where = (3, 1, 2) if name == "cells" else (3, 1)
    with flipped(recorded, name, where, 4):
        found = replay(recorded)
    (finding,) = found.findings
    assert (finding.kind, finding.variable, finding.step) == ("inconsistent", name, 3)
    assert (finding.token, finding.hidden) == (1, 2 if name == "cells" else None)
    assert found.variables[name].differing == 1


def test_an_altered_array_accounts_for_what_is_made_of_it(recorded: Path) -> None:
    with flipped(recorded, "W", (3, 1, 2), 12):
        found = replay(recorded)
    assert [finding.kind for finding in found.findings] == ["mismatch", "mismatch"]


def test_a_gradient_that_is_rounded_away_shows_in_its_length(recorded: Path) -> None:
    # Tokens that never occur have gradients that Adam's epsilon swallows; any step sees the rest.
    with flipped(recorded, "grad", (5, 1, 2), 0):
        found = replay(recorded)
    assert not found.clean
    assert found.findings[0].step == 5
    assert found.variables["grad_token_norm"].differing == 1


@pytest.mark.parametrize("name", ["clip_coef", "grad_norm"])
def test_clipping_is_held_against_the_norm(name: str, recorded: Path) -> None:
    with flipped(recorded, name, (4,), 5):
        found = replay(recorded).findings
    first = found[0]
    assert (first.kind, first.variable, first.step) == ("inconsistent", "clip_coef, grad_norm", 4)
    assert {finding.step for finding in found} == {4}


def test_a_skip_flag_other_than_0_and_1_is_invalid(tmp_path: Path) -> None:
    path = scaled_run(tmp_path / "run.zarr", fused=False)
    flip(path, "skipped", (10,), 3)
    finding = replay(path).findings[0]
    assert (finding.kind, finding.variable, finding.step) == ("invalid", "skipped", 10)


def test_row_0_must_be_the_state_before_training(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=3)
    flip(path, "exp_avg", (0, 6, 1), 0)
    flip(path, "grad", (0, 8, 2), 3)
    assert {(f.kind, f.variable, f.step, f.token) for f in replay(path).findings} == {
        ("start", "exp_avg", 0, 6),
        ("start", "grad", 0, 8),
    }
