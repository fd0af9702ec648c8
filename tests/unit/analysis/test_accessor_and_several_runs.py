"""`ds.traj` and its figures; quantities of several runs, and where two runs part."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trajstore.analysis.figures
from trajstore import analysis, open_run
from trajstore.analysis.accessor import Plots, TrajAccessor
from trajstore.analysis.commands.plot import plot
from trajstore.analysis.figures.figure import Drawing
from trajstore.analysis.methods import Methods
from trajstore.analysis.several_quantities import ACROSS_RUNS, compute_named
from trajstore.analysis.several_runs import each_run
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded
from trajstore.schema import MIN_UNCHANGED


def test_the_accessor_describes_a_run(small_run: tuple[Path, Any]) -> None:
    ds = open_run(small_run[0])
    assert repr(ds.traj) == (
        "<run: 11 rows, steps 0 to 20; 10 tokens, 4 of them dead; W, grad, logits, loss; complete>"
    )
    two = xr.concat([ds, ds], "run", data_vars="all")
    assert repr(two.traj).startswith("<2 runs: 11 rows, steps 0 to 20; 10 tokens, 4 of them dead;")
    differ = two.assign_coords(is_dead=(("run", "token"), [ds.is_dead.values, ~ds.is_dead.values]))
    assert "; 10 tokens; W" in repr(differ.traj)
    assert repr(xr.Dataset().traj) == "<run: 0 rows; 0 tokens; no variables; part of a run>"
    with pytest.raises(AttributeError, match=r"ds\.traj has no 'nonsense'"):
        ds.traj.nonsense  # noqa: B018
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        ds.drop_vars("is_dead").traj.dead  # noqa: B018


def test_a_token_is_found_by_its_text() -> None:
    texts = np.array(["a", " b", "c", "c", "\0"], object)
    ds = xr.Dataset(coords={"token": [7, 8, 9, 10, 11], "token_text": ("token", texts)})
    assert [ds.traj.token(text) for text in ("a", "\0")] == [7, 11]
    without = ds.drop_vars("token_text")
    for run, text, error, message in (
        (ds, "c", InvalidArgument, r"'c', which 2 tokens have: 9, 10; select one by"),
        (ds, "b", InvalidArgument, r"'b' \(did you mean ' b'\?\), expected the text"),
        (without, "a", VariableNotRecorded, "no token_text; label the tokens"),
    ):
        with pytest.raises(error, match=message):
            run.traj.token(text)


def test_a_run_is_written_to_netcdf(small_run: tuple[Path, Any], tmp_path: Path) -> None:
    ds = open_run(small_run[0])
    with pytest.raises(InvalidArgument, match=r"got a\.h5, expected NAME\.nc"):
        ds.traj.to_netcdf("a.h5")
    ds.isel(step=slice(3)).traj.to_netcdf(tmp_path / "a.nc")
    with pytest.raises(RunExists):
        ds.traj.to_netcdf(tmp_path / "a.nc")
    with xr.open_dataset(tmp_path / "a.nc") as again:
        assert (again.W.values.view("u4") == ds.W[:3].values.view("u4")).all()
        assert again.token_text.values.tolist() == ds.token_text.values.tolist()
        assert json.loads(again.attrs["config"]) == ds.attrs["config"] == {"why": "a test"}


def test_help_shows_what_methods_take(small_run: tuple[Path, Any]) -> None:
    ds = open_run(small_run[0])
    shown = pydoc.plain(pydoc.render_doc(ds.traj.freeze))
    assert "freeze(min_unchanged: 'Count' = 50, lattice: 'str' = 'native', per: " in shown
    assert "Last motion of each token, and the fraction of tokens that are frozen" in shown
    shown = pydoc.plain(pydoc.render_doc(ds.traj.plot.last_motion))
    assert "last_motion(ax: 'Axes | None' = None, *, other:" in shown
    assert f"min_unchanged: 'int' = {MIN_UNCHANGED}" in shown
    assert "Step at which each token moved last." in shown
    assert "lattice" not in str(inspect.signature(ds.traj.plot.loss))


def test_every_function_is_a_method() -> None:
    methods = {name for name in vars(Methods) if not name.startswith("_")} | {"compute"}
    assert {name for name in analysis.__all__ if name.islower()} == methods | {"by_population"}
    assert methods > analysis.QUANTITIES.keys() | ACROSS_RUNS.keys()
    for name in methods:
        assert getattr(TrajAccessor, name).__wrapped__ is getattr(analysis, name)
    for name, quantity in analysis.QUANTITIES.items():
        assert getattr(analysis, name) is quantity.function


def test_every_kind_is_a_method() -> None:
    ds = xr.Dataset({"loss": ("step", [3.0, 2.0, 1.0])}, coords={"step": [0, 1, 2]})
    kinds = {*trajstore.analysis.figures.FIGURES}
    assert {*dir(ds.traj.plot)} == kinds | {"film"} == Plots.__annotations__.keys() | {"film"}
    assert kinds < {*re.findall(r"\w+", plot.help or "")}
    ax = ds.traj.plot.loss(log="y")
    assert ax.lines[0].get_ydata().tolist() == [3, 2, 1]
    assert ax.get_yscale() == "log"
    figure = inspect.signature(trajstore.analysis.figures.Figure.__call__).parameters
    options = inspect.signature(trajstore.analysis.figures.Options).parameters
    known = {name: one.default for name, one in (figure | options).items()}
    drawing = inspect.signature(Drawing.__call__).parameters
    assert known == {name: known[name] for name in ("ds", "options")} | {
        name: one.default for name, one in drawing.items()
    }
    with pytest.raises(AttributeError, match=r"no 'los' \(did you mean 'loss'\?\); it has auto"):
        ds.traj.plot.los  # noqa: B018
    with pytest.raises(VariableNotRecorded, match="W"):
        ds.traj.plot.film()


@pytest.mark.nightly
def test_importing_analysis_does_not_import_zarr() -> None:
    loaded = "import trajstore.analysis.accessor, sys; print({'xarray', 'zarr'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, check=True)
    assert done.stdout == b"{'xarray'}\n"


@pytest.fixture(scope="module")
def three(make_run) -> xr.Dataset:
    rng, known = np.random.default_rng(1), {"native": "float32", "is_dead": np.arange(6) < 2}
    runs = [
        make_run(rng.normal(size=(9, 6, 3)).astype("f4"), chunks=(rows, 6, 3), **known)
        for rows in (4, 3, 7)
    ]
    together = xr.concat(runs, "run", data_vars="all", coords="minimal", compat="override")
    return together.assign_coords(run=["0", "1", "2"], token=np.arange(6))


def test_each_run_is_compared_with_the_first(three: xr.Dataset) -> None:
    got = analysis.divergence(three).compute()
    first = each_run(three)[0]
    for number, other in enumerate(each_run(three)):
        found = got.isel(run=number, drop=True)
        xr.testing.assert_equal(found, analysis.divergence(first, other).compute())
        compared = analysis.compare(first, other).sel(variable="W")
        distance = found.distance.sel(population="all")
        np.testing.assert_allclose(distance, compared.distance, rtol=1e-13)
        assert found.first_difference == compared.first_difference
    without = three.drop_vars("is_dead").traj.divergence()
    assert without.population.values.tolist() == ["all"]


def test_two_runs_from_a_common_start(three: xr.Dataset) -> None:
    one = each_run(three)[0]
    W = one.W.values.copy()
    W[4:, 0, 1] += 1
    W[6:, 3:, :] = -W[6:, 3:, :]  # −0 and 0 differ in a bit, but have distance 0
    W[7, 5, 0] = np.nan
    one = one.assign(W=one.W.where(one.token != 3, 0))
    W[6:, 3] = -0.0
    W[:6, 3] = 0
    other = one.assign(W=(one.W.dims, W)).isel(step=slice(1, 9)).chunk(step=2, token=4)
    lazy = analysis.divergence(one, other)
    assert all(array.chunks is not None for array in lazy.data_vars.values())
    got = lazy.compute()
    assert got.step.values.tolist() == list(range(1, 9))
    assert got.first_difference == 4
    assert "run" not in got.dims
    before, after = one.W.values[1:], W[1:]
    differs = before.view("u4") != after.view("u4")
    square = (before.astype("f8") - after) ** 2
    for name, group in {"dead": slice(0, 2), "live": slice(2, 6), "all": slice(0, 6)}.items():
        part = got.sel(population=name)
        distance = np.sqrt(square[:, group].sum((1, 2)))
        np.testing.assert_allclose(part.distance, distance, rtol=1e-13)
        mean = np.sqrt(square[:, group].sum(2)).mean(1)
        np.testing.assert_allclose(part.mean_distance, mean, rtol=1e-13)
        np.testing.assert_array_equal(part.differing, differs[:, group].mean((1, 2)))
    xr.testing.assert_identical(one.traj.divergence(other).compute(), got)


def test_the_results_are_those_of_each_run(three: xr.Dataset) -> None:
    one = each_run(three)[1].load()
    for name in ("freeze", "clusters"):
        got = getattr(three.traj, name)().isel(run=1, drop=True)
        expected = getattr(analysis, name)(one)
        xr.testing.assert_equal(got.load(), expected.load())
        assert all(got[key].attrs == array.attrs for key, array in expected.items())
    names = ["speed", "freeze"]
    got = compute_named(three, names).isel(run=1, drop=True)
    xr.testing.assert_equal(got.load(), analysis.compute(one, names).load())
    bands = compute_named(three, ["speed"], by_population=True)
    assert bands["mean"].dims == ("run", "step", "population")


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


def test_where_runs_part_and_how_far_they_go(pair):
    a, b = pair
    got = analysis.compare(a.chunk(step=3, token=2), b.chunk(step=5, token=3)).compute()
    assert got.first_difference.to_series().to_dict() == {"W": 7, "grad": -1, "loss": 10}
    for name in ("W", "loss"):
        difference = a[name].values.astype(np.float64) - b[name].values
        expected = np.sqrt(np.nansum(difference.reshape(12, -1) ** 2, axis=1))
        np.testing.assert_allclose(got.distance.sel(variable=name), expected, rtol=1e-12)
    assert got.differs.sel(variable="W").values.nonzero()[0].tolist() == [7, 9]


def test_bits_count_not_values(make_run):
    a = np.array([[[0x0000, 0x7FC0, 0x7F80, 0x3F80]]], np.uint16)
    zero, payload = [0x8000, 0, 0, 0], [0, 1, 0, 0]
    for flipped, first, distance in ((0, -1, 0), (zero, 0, 0), (payload, 0, np.nan)):
        got = analysis.compare(make_run(a), make_run(a ^ np.uint16(flipped))).compute()
        assert got.first_difference.item() == first
        np.testing.assert_equal(got.distance.item(), distance)


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
    for over, first in ((0.01, 6), (0.001, 1), (0.05, -1)):
        got = analysis.compare(a, b, over=over)
        assert got.first_over == first
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
    for run, seed in ((a, 1), (b, 2)):  # of an own loop
        run.attrs = run.attrs | {"config": {}, "provenance": {"seed": seed}}
    assert analysis.compare(a, b).attrs["differing_settings"] == ["config.training.seed"]


def test_wrong_calls_with_several_runs_are_errors(three: xr.Dataset) -> None:
    one, two = each_run(three)[:2]
    wider = two.isel(token=slice(0, 5), hidden=[0]).assign_attrs(config={"model": {"hidden": 1}})
    sizes = r"token has length 6 and 5; hidden has length 3 and 1; .* config.model.hidden"
    turned, other_dead = (
        two.isel(token=slice(None, None, -1)),
        two.assign_coords(is_dead=~two.is_dead),
    )
    differing = iter((3, 4, 5))
    for function, arguments, message in (
        (analysis.divergence, (three, one), "open all runs together"),
        (analysis.divergence, (one,), r"open_runs\('runs"),
        (analysis.divergence, (one, two.isel(token=slice(0, 4))), "token has length 6 and 4"),
        (analysis.divergence, (one, other_dead), "different dead tokens"),
        (analysis.divergence, (one.isel(step=[0]), two.isel(step=[1])), "no common step"),
        (analysis.compare, (one, wider), sizes),
        (analysis.compare, (one, turned), "6 of 6 ids along token differ"),
        (analysis.compare, (one.isel(step=[0, 1]), two.isel(step=[5, 6])), "no common step"),
        (analysis.speed, (three,), "got several runs, expected one"),
        (compute_named, (one, ["divergence"]), "got one run for divergence, expected several"),
        (compute_named, (three, ["divergence", "speed"]), "cannot be combined"),
        (three.traj.over_runs, (lambda run: run.step[: next(differing)],), "cannot be joined"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            function(*arguments)
    with pytest.raises(VariableNotRecorded, match="W"):
        three.drop_vars("W").traj.divergence()


def test_runs_of_two_types_differ_in_either_order(pair):
    a, _ = pair
    a = a[["W"]]
    b = a.assign(W=np.nextafter(a.W.astype(np.float64), np.inf))  # which float32 rounds away
    for runs in ((a, b), (b, a)):
        assert int(analysis.compare(*runs).first_difference[0]) == 0
    exact = a.assign(W=a.W.astype(np.float64))
    assert int(analysis.compare(a, exact).first_difference[0]) == -1
