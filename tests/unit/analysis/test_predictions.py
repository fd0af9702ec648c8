"""Gradients of dead tokens, compared with sums over positions."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ROWS, TOKENS, HIDDEN, EXAMPLES, POSITIONS = 6, 7, 3, 4, 5
DEAD = [2, 5, 6]


@pytest.fixture
def run(make_run) -> xr.Dataset:
    """float32 rows with random gradients."""
    rng = np.random.default_rng(0)
    ds = make_run(
        rng.normal(size=(ROWS, TOKENS, HIDDEN)).astype("f4"),
        grad=rng.normal(size=(ROWS, TOKENS, HIDDEN)).astype("f4"),
        native="float32",
    )
    states = rng.normal(size=(ROWS, EXAMPLES, POSITIONS, HIDDEN)).astype("f4")
    return ds.assign(
        hidden_states=(("step", "example", "position", "hidden"), states),
        batch=(("step", "example"), rng.integers(0, 99, (ROWS, EXAMPLES)).astype("f8")),
    ).assign_coords(
        token=[4, 3, 6, 0, 1, 2, 5],
        is_dead=("token", [False, False, True, False, False, True, True]),
    )


def by_hand(ds: xr.Dataset, step: int, token: int, last: int, count: float) -> np.ndarray:
    """Contribution of each example, (example, hidden)."""
    place = ds.token.values.tolist().index(token)
    W = ds.W.sel(step=step - 1).values.astype("f8")
    states = ds.hidden_states.sel(step=step).values.astype("f8")
    made = np.zeros((len(states), HIDDEN))
    for example, positions in enumerate(states):
        for h in positions[:last]:
            if not np.isnan(h).any():
                z = [sum(a * b for a, b in zip(row, h, strict=True)) for row in W]
                p = np.exp(z[place]) / sum(np.exp(other) for other in z)
                made[example] += p * h / count
    return made


@pytest.mark.parametrize(("targets", "last"), [("shifted", POSITIONS - 1), ("all", POSITIONS)])
def test_position_by_position(run, targets, last):
    found = analysis.explain_gradient(run, [3, 1], DEAD, targets=targets).compute()
    assert found.step.values.tolist() == [3, 1]
    assert found.token.values.tolist() == DEAD
    xr.testing.assert_equal(found.batch.drop_vars(["batch", "step"]),
                            run.batch.sel(step=[3, 1]).drop_vars("step"))  # fmt: skip
    for step in (3, 1):
        for token in DEAD:
            parts = by_hand(run, step, token, last, EXAMPLES * last)
            made = parts.sum(0)
            grad = run.grad.sel(step=step, token=token).values.astype("f8")
            one = found.sel(step=step, token=token)
            np.testing.assert_allclose(one.explained, np.linalg.norm(made))
            np.testing.assert_allclose(one.recorded, np.linalg.norm(grad))
            error = np.linalg.norm(made - grad) / np.linalg.norm(grad)
            np.testing.assert_allclose(one.relative_error, error)
            cosine = made @ grad / np.linalg.norm(made) / np.linalg.norm(grad)
            np.testing.assert_allclose(one.cosine, cosine)
            np.testing.assert_allclose(one.share, parts @ made / (made @ made))
            assert one.share[one.by_share].values.tolist() == sorted(one.share.values)[::-1]
    np.testing.assert_allclose(found.share.sum("example"), 1)


def test_an_explained_gradient_has_no_error(run):
    grad = run.grad.copy()
    for token in DEAD:
        place = run.token.values.tolist().index(token)
        grad[4, place] = by_hand(run, 4, token, POSITIONS - 1, 40).sum(0)
    found = analysis.explain_gradient(run.assign(grad=grad), 4, DEAD, denominator=40)
    np.testing.assert_allclose(found.relative_error, 0, atol=1e-6)
    np.testing.assert_allclose(found.cosine, 1)


def test_missing_examples_and_positions_are_ignored(run):
    states = run.hidden_states.copy()
    states[2, 3] = np.nan  # one example fewer
    states[2, :, 4] = np.nan  # and a shorter text
    ds = run.assign(hidden_states=states)
    found = analysis.explain_gradient(ds, 2, 5, targets="all").compute()[{"step": 0, "token": 0}]
    made = by_hand(ds, 2, 5, POSITIONS, 3 * 4).sum(0)
    np.testing.assert_allclose(found.explained, np.linalg.norm(made))
    assert np.isnan(found.share[3])
    assert found.by_share[3] == -1
    assert sorted(found.by_share.values[:3]) == [0, 1, 2]


def test_chunks_do_not_matter_and_it_is_lazy(run):
    expected = analysis.explain_gradient(run, [1, 4], DEAD).compute()
    chunked = run.chunk(step=2, token=3, hidden=2, example=3, position=2)
    found = analysis.explain_gradient(chunked, [1, 4], DEAD)
    assert all(array.chunks is not None for array in found.data_vars.values())
    with dask.config.set(scheduler="sync"):
        xr.testing.assert_identical(found.compute(), expected)


def test_rounding_as_a_model_of_another_type(run):
    exact, rounded = (
        analysis.explain_gradient(run, 1, DEAD, precision=precision).explained.compute()
        for precision in ("float64", "bfloat16")
    )
    assert (exact != rounded).all()
    np.testing.assert_allclose(rounded, exact, rtol=0.02)


def test_from_the_command_line(run):
    options = ["step=1,3", "token=6", "denominator=12"]
    found = compute_named(run, ["explain_gradient"], options)
    xr.testing.assert_identical(
        found.compute(), analysis.explain_gradient(run, [1, 3], 6, denominator=12).compute()
    )
    with pytest.raises(InvalidArgument, match="requires token"):
        compute_named(run, ["explain_gradient"], ["step=1"])
    with pytest.raises(InvalidArgument, match="compute it separately"):
        compute_named(run, ["explain_gradient", "speed"])


def test_what_cannot_be_explained_is_refused(run):
    def refused(kind, match, ds=run, step=3, token=5, **options):
        with pytest.raises(kind, match=match):
            analysis.explain_gradient(ds, step, token, **options)

    refused(InvalidArgument, "got the live token 4, expected dead tokens", token=[5, 4])
    refused(InvalidArgument, "got token 9, which the run does not hold", token=9)
    refused(StepNotFound, "step 17 is not in the run", step=17)
    refused(StepNotFound, "before training", step=0)
    refused(StepNotFound, "used W of step 3", run.isel(step=[0, 2, 4]), step=4)
    refused(VariableNotRecorded, "hidden_states", run.drop_vars("hidden_states"))
    refused(VariableNotRecorded, "is_dead", run.drop_vars("is_dead"))
    refused(InvalidArgument, "got 3 of the vocabulary's 7 tokens", run.isel(token=[2, 5, 6]))
    other = run.assign_attrs(provenance={"what_if": {"run": "run.zarr"}})
    refused(InvalidArgument, "got a what-if run", other)
    fewer = run.sel(token=[0, 1, 2]).assign_attrs(recording={"vocabulary": 7})
    refused(InvalidArgument, "got 3 of the vocabulary's 7 tokens", fewer, token=2)


def test_statistics_of_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (7, 9)).astype(np.float32)
    logits[0] = np.nan
    logits[1] = 1.5
    logits[2, 3] = -np.inf
    logits[3] *= 1000  # its exponential overflows
    dead = np.arange(9) % 2 == 0
    ds = xr.Dataset(
        {"logits": (("step", "token"), logits)},
        coords={"step": np.arange(7), "token": np.arange(9), "is_dead": ("token", dead)},
    )
    for chunked in (ds, ds.chunk(step=3, token=4)):
        got = analysis.logit_stats(chunked).compute()
        wide = logits.astype(np.longdouble)
        with np.errstate(all="ignore"):
            weights = np.exp(wide - wide.max(1, keepdims=True))
            p = weights / weights.sum(1, keepdims=True)
            entropy = -np.where(p > 0, p * np.log(p), np.where(np.isnan(p), np.nan, 0)).sum(1)
            np.testing.assert_allclose(got.entropy, entropy.astype(float), atol=1e-12)
            np.testing.assert_allclose(got.dead_mass, p[:, dead].sum(1).astype(float), atol=1e-12)
            np.testing.assert_array_equal(got.logit_min, logits.min(1))
            np.testing.assert_array_equal(got.logit_max, logits.max(1))
            np.testing.assert_allclose(got.logit_range, wide.max(1).astype(float) - wide.min(1))
            np.testing.assert_allclose(got.logit_std, logits.astype(float).std(1))
    assert got.entropy[1] == pytest.approx(np.log(9))
    assert "dead_mass" not in analysis.logit_stats(ds.drop_vars("is_dead"))


def test_logit_stats_need_logits_of_step_and_token(make_run, walk):
    ds = make_run(walk(3, 2, 2))
    with pytest.raises(VariableNotRecorded, match=r"logits.*weights"):
        analysis.logit_stats(ds)
    with pytest.raises(InvalidArgument, match="expected step, token"):
        analysis.logit_stats(ds.assign(logits=ds.W))


@pytest.mark.parametrize("chunks", [None, (3, 2, 2)], ids=str)
def test_mean_logits_equal_the_product_of_W_and_the_mean_state(chunks, make_run, walk):
    bits = walk(8, 5, 4)
    bits[:, 3] = bits[:, 1]
    mean = np.random.default_rng(3).normal(size=(8, 4)).astype("f4")
    mean[0] = np.nan
    ds = make_run(bits, steps=np.array([0, 1, 2, 3, 5, 6, 7, 8]), chunks=chunks)
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.mean_logits(ds)
    ds = ds.assign(hidden_mean=(("step", "hidden"), mean))
    got = analysis.mean_logits(ds, k=3).compute()
    expected = np.einsum("sth,sh->st", ds.W.values[:-1].astype(float), mean[1:].astype(float))
    expected[3] = np.nan  # step 4 is missing
    np.testing.assert_allclose(got.mean_logit[1:], expected)
    for row, logits in enumerate(expected, 1):
        if row == 4:
            assert (got.top_token[row] == -1).all()
            assert got.top_logit[row].isnull().all()
            continue
        order = sorted(range(5), key=lambda token: (-logits[token], token))[:3]
        assert got.top_token[row].values.tolist() == ds.token.values[order].tolist()
        np.testing.assert_allclose(got.top_logit[row], logits[order])
    assert (got.top_token[0] == -1).all()
    with pytest.raises(InvalidArgument, match="k=6, expected 1 to 5"):
        analysis.mean_logits(ds, 6)
