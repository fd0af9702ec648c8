"""Results of a run with changes of W but no W, compared with a run with W."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded

ROWS, TOKENS, HIDDEN = 14, 6, 5
QUANTITIES: dict[str, Any] = {
    "velocity": analysis.velocity,
    "speed": analysis.speed,
    "acceleration": analysis.acceleration,
    "previous": lambda ds: analysis.displacement(ds, since="previous"),
    "from the start": analysis.displacement,
    "from step 9": lambda ds: analysis.displacement(ds, since=9),
    "freeze": lambda ds: analysis.freeze(ds, min_unchanged=2),
    "bulk_thermal": analysis.bulk_thermal,
    "coherence": analysis.coherence,
    "grad_norms": analysis.grad_norms,
    "together": lambda ds: analysis.compute(ds, ["speed", "freeze", "velocity"]),
    "summary": lambda ds: analysis.summary(ds).drop_vars("centroid_norm", errors="ignore"),
}


def both(start: int = 0) -> tuple[xr.Dataset, xr.Dataset]:
    """A run with W, on a grid on which differences and their sums are exact, and one of delta."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-9, 9, (ROWS, TOKENS, HIDDEN)) / 256
    steps[5:, 0] = 0  # token 0 is unchanged from row 5 on, token 1 for some rows
    steps[3:8, 1] = 0
    W = (1 + np.cumsum(steps, axis=0)).astype("f4")
    dims = ("step", "token", "hidden")
    coords = {
        "step": np.arange(start, start + ROWS), "token": np.arange(TOKENS) * 3,
        "is_dead": ("token", np.arange(TOKENS) % 2 == 0),
    }  # fmt: skip
    grad = xr.DataArray(rng.normal(size=W.shape).astype("f4"), dims=dims)
    delta = np.diff(W, axis=0, prepend=W[:1])
    delta[0] = np.nan  # the change to the first row is not used
    held = {"native_dtype": "float32", "units": "1"}
    one = xr.Dataset({"W": (dims, W, held), "grad": grad}, coords)
    return one, xr.Dataset({"delta": (dims, delta, held), "grad": grad}, coords)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_quantities_of_changes_equal_those_of_W(quantity: str) -> None:
    with_W, changes = both()
    compute = QUANTITIES[quantity]
    expected = compute(with_W).compute()
    xr.testing.assert_identical(compute(changes.chunk(step=4, token=4)).compute(), expected)


def test_quantities_of_changes_are_lazy() -> None:
    _, changes = both()
    for name in ("velocity", "speed", "displacement", "coherence"):
        assert getattr(analysis, name)(changes.chunk(step=4)).chunks is not None


def test_changes_alone_do_not_give_positions() -> None:
    _, changes = both()
    quantities = (
        analysis.centroid, analysis.regimes, analysis.lifecycle, analysis.distinct, analysis.ulp,
        analysis.lattice_displacement, lambda ds: analysis.freeze(ds, lattice="bfloat16"),
    )  # fmt: skip
    for compute in quantities:
        with pytest.raises(
            VariableNotRecorded, match=r"it holds delta, .* only give quantities of motion"
        ):
            compute(changes)


def test_steps_without_a_row_are_refused() -> None:
    _, changes = both()
    for compute in (analysis.speed, analysis.velocity, analysis.freeze, analysis.displacement):
        with pytest.raises(InvalidArgument, match=r"step 0 is followed by step 2; .* consecutive"):
            compute(changes.isel(step=slice(0, None, 2)))
    later = changes.isel(step=slice(3, None))
    assert analysis.speed(later).identical(analysis.speed(changes).isel(step=slice(3, None)))


def test_a_change_that_is_not_a_number_is_motion() -> None:
    _, changes = both()
    changes["delta"][-1, 0, 0] = np.nan
    rest = analysis.freeze(changes)
    assert rest.last_motion.values[0] == changes.step.values[-1]
    assert np.isnan(analysis.displacement(changes).values[-1, 0])
