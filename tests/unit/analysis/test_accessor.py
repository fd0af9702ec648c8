"""Figures as methods of `ds.traj.plot`."""

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
from trajstore.analysis.several_quantities import ACROSS_RUNS
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
