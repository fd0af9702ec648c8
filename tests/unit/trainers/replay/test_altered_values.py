"""One stored bit is flipped, with a valid checksum: the replay names step, token and variable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from altered_runs import flip  # noqa: E402
from list_recorder import HIDDEN, VOCAB  # noqa: E402
from tiny_runs import scaled_run, tiny_run  # noqa: E402

from trajstore.trainers.replay.replay import replay  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 19
# First and last row, both sides of the boundaries of blocks of 4 rows, and some between.
ROWS = (0, 1, 2, 3, 4, 7, 8, 13, 15, 16, 18, 19)
WIDTH = {torch.float32: 32, torch.bfloat16: 16}
DTYPES = pytest.mark.parametrize("dtype", WIDTH, ids=["float32", "bfloat16"])

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Altered:
    """A run of which one bit after the other is altered, and what the replays named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()

    def check(self, variable: str, where: tuple[int, ...], bit: int) -> None:
        """Flip, replay, and see that this value and nothing else is named."""
        flip(self.path, variable, where, bit)
        result = replay(self.path)
        flip(self.path, variable, where, bit)  # and back
        what = f"{variable} {where} bit {bit}: {[f.sentence for f in result.findings]}"
        if result.clean:
            self.counts["unseen"] += 1
            return
        assert result.total == 1, what
        (finding,) = result.findings
        row, token, hidden = (*where, None, None)[:3]
        named = (finding.variable, finding.step, finding.token)
        if named == (variable, row, token) and not finding.others:
            # From a length alone, the position may not be told.
            assert finding.hidden in (hidden, None), what
            assert finding.values == 1, what
            self.counts["named"] += 1
        else:  # another explanation fits every stored bit as well, and this one is listed too
            assert named == (variable, row, token) or f"{variable} at step {row}" in finding.others
            assert token == finding.token or finding.token is None, what
            self.counts["among"] += 1


@pytest.fixture(scope="module", params=OPTIMIZERS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By type: runs of an optimizer, with what summaries they are asked for."""
    made: dict[Any, Path] = {}

    def run(dtype: Any, *summaries: str) -> Altered:
        if (dtype, summaries) not in made:
            path = tmp_path_factory.mktemp(request.param) / "run.zarr"
            record = ("all", *summaries)
            made[dtype, summaries] = tiny_run(
                path, OPTIMIZERS[request.param], dtype=dtype, steps=STEPS, record=record
            )
        return Altered(made[dtype, summaries])

    return run


def places(rng: np.random.Generator, count: int = 1) -> list[tuple[int, int, int]]:
    return [
        (row, int(rng.integers(VOCAB)), int(rng.integers(HIDDEN)))
        for row in ROWS
        for _ in range(count)
    ]


@pytest.mark.parametrize("variable", ["W", "exp_avg", "exp_avg_sq"])
@DTYPES
def test_weights_and_moments(variable: str, dtype: Any, recorded: Any) -> None:
    run = recorded(dtype)
    rng = np.random.default_rng(0)
    for where in places(rng, 2):
        run.check(variable, where, int(rng.integers(WIDTH[dtype])))
    # An alteration that two explanations fit, exactly, is rare even in a run of 136 values.
    assert run.counts["named"] >= 0.85 * sum(run.counts.values()), run.counts
    assert run.counts["unseen"] == 0


@DTYPES
def test_gradients(dtype: Any, recorded: Any) -> None:
    run = recorded(dtype)
    rng = np.random.default_rng(1)
    for where in places(rng):
        # Of smaller changes, the optimizer's roundings may leave nothing.
        run.check("grad", where, int(rng.integers(WIDTH[dtype] - 9, WIDTH[dtype])))
    assert run.counts["named"] >= 0.85 * sum(run.counts.values()), run.counts
    assert run.counts["unseen"] <= 1


def test_recorded_lengths_show_what_is_rounded_away(recorded: Any) -> None:
    blind, seeing = recorded(torch.bfloat16), recorded(torch.bfloat16, "grad_token_norm")
    rng = np.random.default_rng(2)
    for where in places(rng):
        for run in (blind, seeing):
            run.check("grad", where, int(rng.integers(4)))
    assert seeing.counts["unseen"] <= blind.counts["unseen"]
    assert seeing.counts["unseen"] <= 1
    assert seeing.counts["named"] >= 0.85 * sum(seeing.counts.values()), seeing.counts


@pytest.mark.parametrize("name", ["grad_token_norm", "W_step_norm", "W_ulp_l1"])
@DTYPES
def test_summaries(name: str, dtype: Any, recorded: Any) -> None:
    run = recorded(dtype, "grad_token_norm", "W_step_norm", "W_ulp_l1")
    rng = np.random.default_rng(3)
    for row in ROWS[1:]:
        run.check(name, (row, int(rng.integers(VOCAB))), int(rng.integers(32)))
    assert run.counts["named"] >= 0.8 * sum(run.counts.values()), run.counts
    assert run.counts["unseen"] == 0


@pytest.mark.parametrize("variable", ["W", "exp_avg", "grad"])
def test_altered_arrays_account_for_their_summaries(variable: str, recorded: Any) -> None:
    run = recorded(torch.float32, "grad_token_norm", "W_step_norm", "W_ulp_l1")
    rng = np.random.default_rng(4)
    for where in places(rng):
        run.check(variable, where, int(rng.integers(16, 32)))
    assert run.counts["named"] >= 0.85 * sum(run.counts.values()), run.counts


@DTYPES
def test_scalars_of_a_step(dtype: Any, recorded: Any) -> None:
    run = recorded(dtype)
    for row in ROWS[1:]:
        run.check("lr", (row,), 50)
        run.check("lr", (row,), 62)  # no optimizer can calculate with it
        run.check("clip_coef", (row,), WIDTH[dtype] - 12)
        run.check("grad_norm", (row,), WIDTH[dtype] - 9)
    assert run.counts["named"] == sum(run.counts.values()), run.counts


def test_weights_and_gradients_alone(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", dtype=torch.bfloat16, record="weights+grads")
    run, rng = Altered(path), np.random.default_rng(5)
    for where in places(rng):
        run.check("W", where, int(rng.integers(3, 16)))
    assert run.counts["named"] >= 0.6 * sum(run.counts.values()), run.counts


def test_plain_sgd(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", lambda p: torch.optim.SGD(p, lr=0.1))
    run, rng = Altered(path), np.random.default_rng(6)
    for where in places(rng):
        run.check("W", where, int(rng.integers(8, 32)))
        run.check("grad", where, int(rng.integers(23, 32)))
    assert run.counts["named"] >= 0.6 * sum(run.counts.values()), run.counts


@pytest.mark.parametrize("variable", ["W", "exp_avg", "exp_avg_sq"])
def test_around_skipped_steps(variable: str, tmp_path: Path) -> None:
    run = Altered(scaled_run(tmp_path / "run.zarr", fused=False, block_rows=4))
    for row in range(15):
        run.check(variable, (row, row, 3), 20)
    assert run.counts["named"] >= 0.6 * sum(run.counts.values()), run.counts
    assert run.counts["unseen"] == 0


def test_a_skip_that_is_not_one_or_zero(tmp_path: Path) -> None:
    path = scaled_run(tmp_path / "run.zarr", fused=False)
    flip(path, "skipped", (10,), 3)
    finding = replay(path).findings[0]
    assert (finding.variable, finding.step) == ("skipped", 10)


def test_tokens_are_named_by_id(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", tokens=[3, 5, 16])
    flip(path, "exp_avg", (9, 2, 1), 20)
    (finding,) = replay(path).findings
    assert (finding.variable, finding.step, finding.token) == ("exp_avg", 9, 16)


def test_several_alterations_are_each_named(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr")
    altered = [("W", 4, 3), ("exp_avg", 5, 3), ("exp_avg_sq", 5, 11), ("grad", 12, 0)]
    for variable, row, token in altered:
        flip(path, variable, (row, token, 2), 25)
    result = replay(path)
    assert [(f.variable, f.step, f.token) for f in result.findings] == altered
    assert result.variables["W"].first == {"step": 4, "token": 3, "hidden": 2}
    assert not result.clean


def test_a_seam_is_named_once(tmp_path: Path) -> None:
    def stitch(model: Any, number: int) -> None:
        if number == 9:
            with torch.no_grad():  # between two steps, where no recorder sees it
                model.embedding.weight.mul_(1.01)

    for tier in ("all", "weights+grads"):
        result = replay(tiny_run(tmp_path / f"{tier}.zarr", between=stitch, record=tier))
        (finding,) = result.findings
        assert (finding.kind, finding.variable, finding.step) == ("diverged", "W", 11)
        assert finding.tokens == VOCAB
        assert finding.values > 0.9 * VOCAB * HIDDEN
        assert finding.ulps is not None
        assert finding.ulps > 100


def test_many_findings_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=60)
    for row in range(2, 60, 2):
        flip(path, "exp_avg_sq", (row, 1, 1), 20)
    result = replay(path)
    assert result.total == 29
    assert [finding.step for finding in result.findings] == list(range(2, 42, 2))


def test_row_0_must_be_the_state_before_training(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr")
    flip(path, "exp_avg", (0, 6, 1), 0)
    flip(path, "grad", (0, 8, 2), 3)
    assert {(f.kind, f.variable, f.step, f.token) for f in replay(path).findings} == {
        ("start", "exp_avg", 0, 6),
        ("start", "grad", 0, 8),
    }
