from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture
def pair(make_run, walk):
    bits = walk(12, 5, 4)
    loss = np.linspace(3, 2, 12).astype(np.float32)
    loss[0] = np.nan
    a = make_run(bits, grad=bits.copy(), loss=loss)
    other = bits.copy()
    other[7, 2, 1] ^= 1
    other[9, 4] ^= 2
    b = make_run(other, grad=bits.copy(), loss=np.where(np.arange(12) < 10, loss, 0))
    return a, b


@pytest.mark.parametrize("in_blocks", [False, True])
def test_where_runs_part_and_how_far_they_go(pair, in_blocks):
    a, b = pair
    if in_blocks:
        a = a.chunk(step=3, token=2)
        b = b.chunk(step=5, token=3)
    got = analysis.compare(a, b).compute()
    assert got.first_difference.to_series().to_dict() == {"W": 7, "grad": -1, "loss": 10}
    for name in ("W", "loss"):
        difference = a[name].values.astype(np.float64) - b[name].values
        expected = np.sqrt(np.nansum(difference.reshape(12, -1) ** 2, axis=1))
        np.testing.assert_allclose(got.distance.sel(variable=name), expected, rtol=1e-12)
    assert got.differs.sel(variable="W").values.nonzero()[0].tolist() == [7, 9]


def test_bits_count_not_values(make_run):
    a = np.array([0x0000, 0x7FC0, 0x7F80, 0x3F80], np.uint16).reshape(1, 1, 4)
    same = analysis.compare(make_run(a), make_run(a.copy())).compute()
    assert same.first_difference.item() == -1
    assert same.distance.item() == 0
    zero, payload = a.copy(), a.copy()
    zero[0, 0, 0] = 0x8000
    payload[0, 0, 1] = 0x7FC1
    assert analysis.compare(make_run(a), make_run(zero)).first_difference == 0
    different = analysis.compare(make_run(a), make_run(payload))
    assert different.first_difference == 0
    assert np.isnan(different.distance).all()


@pytest.mark.parametrize("swapped", [False, True])
def test_nan_in_the_first_row_of_a_later_run_is_no_difference(pair, swapped):
    a, b = pair
    for run, part in ((b, 10), (a, -1)):
        late = run.isel(step=slice(4, None))
        later = late.step > late.step[0]
        late = late.assign(loss=late.loss.where(later), grad=late.grad.where(later))
        got = analysis.compare(*((late, a) if swapped else (a, late)))
        assert got.first_difference.sel(variable=["grad", "loss"]).values.tolist() == [-1, part]
        assert not got.differs.sel(step=4, variable=["grad", "loss"]).any()
    late.loss[0] = 99
    assert analysis.compare(a, late).first_difference.sel(variable="loss") == 4


def test_the_first_step_at_which_losses_differ_by_more_than_a_fraction(pair):
    a, b = pair
    b = b.assign(loss=a.loss * xr.where(b.step < 6, 1.005, 1.02))
    assert analysis.compare(a, b, over=0.01).first_over == 6
    assert analysis.compare(a, b, over=0.001).first_over == 1
    got = analysis.compare(a, b, over=0.05)
    assert got.first_over == -1
    assert np.isnan(got.loss_difference[0])
    np.testing.assert_allclose(got.loss_difference[6:], 0.02, rtol=1e-5)
    assert "loss_difference" not in analysis.compare(a, b)
    with pytest.raises(InvalidArgument, match="got over=-1, expected a fraction such as"):
        analysis.compare(a, b, over=-1)
    with pytest.raises(VariableNotRecorded, match="loss"):
        analysis.compare(a, b.drop_vars("loss"), over=0.01)


def test_only_common_steps_and_variables_are_compared(pair):
    a, b = pair
    got = analysis.compare(a.isel(step=slice(0, 9)), b.isel(step=slice(4, None, 2)).drop_vars("W"))
    assert got.step.values.tolist() == [4, 6, 8]
    assert got["variable"].values.tolist() == ["grad", "loss"]


def test_settings_that_differ_are_named(pair):
    a, b = pair
    a.attrs["config"] = {"training": {"seed": 1, "steps": 5}, "model": {"hidden": 4}}
    b.attrs["config"] = {"training": {"seed": 2, "steps": 5}, "data": {"corpus": "x"}}
    got = analysis.compare(a, b).attrs["differing_settings"]
    assert got == ["config.data.corpus", "config.model.hidden", "config.training.seed"]


def test_mixed_runs_are_refused_with_what_differs(pair, make_run, walk):
    a, b = pair
    wider = make_run(walk(12, 6, 3)).assign_attrs(config={"model": {"hidden": 3}})
    message = r"token has length 5 and 6; hidden has length 4 and 3; .* config.model.hidden"
    with pytest.raises(InvalidArgument, match=message):
        analysis.compare(a, wider)
    with pytest.raises(InvalidArgument, match="4 of 5 ids along token differ"):
        analysis.compare(a, b.isel(token=slice(None, None, -1)))
    with pytest.raises(InvalidArgument, match="no common step"):
        analysis.compare(a.isel(step=[0, 1]), b.isel(step=[5, 6]))


def test_runs_of_two_types_differ_in_either_order(pair):
    a, _ = pair
    a = a[["W"]]
    b = a.assign(W=np.nextafter(a.W.astype(np.float64), np.inf))  # which float32 rounds away
    for runs in ((a, b), (b, a)):
        assert int(analysis.compare(*runs).first_difference[0]) == 0
    exact = a.assign(W=a.W.astype(np.float64))
    assert int(analysis.compare(a, exact).first_difference[0]) == -1
