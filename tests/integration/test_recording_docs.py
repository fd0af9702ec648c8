"""Whole scripts of the how-tos run as they are printed, and are as short as they claim."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = {
    name: script
    for page in (DOCS / "howto").glob("*.md")
    for name, script in re.findall(
        r"<!-- run: (\w+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL
    )
}


def test_the_docs_have_a_script_for_each_way_to_train() -> None:
    assert set(SCRIPTS) == {"trainer", "lightning", "loop", "accelerate"}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            # Lightning warns about its logger, and about few batches.
            name,
            marks=[pytest.mark.filterwarnings("ignore::UserWarning")] * (name == "lightning"),
        )
        for name in SCRIPTS
    ],
)
def test_a_script_of_the_docs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lightning":
        pytest.importorskip("lightning")
    assert len([line for line in SCRIPTS[name].splitlines() if line.strip()]) < 25
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS["loop"] if name == "accelerate" else "") + SCRIPTS[name])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    path = min(tmp_path.glob("*.zarr"))  # that of accelerate, before that of the loop
    ds = xr.open_zarr(path)
    assert ds.attrs["status"] == "complete"
    assert ds.sizes["step"] > 5
    assert set(ds) >= {"W", "grad", "exp_avg", "exp_avg_sq", "logits", "loss"}
    assert ds.W.shape[1] == 128
    assert ds.loss.values[-1] < ds.loss.values[1]
    never = np.isin(np.arange(128), list(b"In my younger and more vulnerable years "), invert=True)
    assert (ds.grad.values[1, never] != 0).any(axis=-1).all()
