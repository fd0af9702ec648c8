"""Figures as methods of `ds.traj.plot`."""

from __future__ import annotations

import pytest
import xarray as xr

import analysis.figures
from trajstore.errors import VariableNotRecorded

pytest.importorskip("matplotlib").use("Agg")


def test_every_kind_is_a_method() -> None:
    ds = xr.Dataset({"loss": ("step", [3.0, 2.0, 1.0])}, coords={"step": [0, 1, 2]})
    assert len(dir(ds.traj.plot)) == len(analysis.figures.FIGURES)
    ax = ds.traj.plot.loss(log="y")
    assert ax.lines[0].get_ydata().tolist() == [3, 2, 1]
    assert ax.get_yscale() == "log"
    with pytest.raises(AttributeError, match=r"no ds\.traj\.plot\.los; there are bulk_thermal"):
        ds.traj.plot.los  # noqa: B018
    with pytest.raises(VariableNotRecorded, match="W"):
        ds.traj.plot.last_motion()
