"""The page about several runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from trajstore import RunWriter
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.results.report_page import write_runs_report

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def write(path: Path, *, later: float = 0, tokens: int = 3, lr: float = 0.1) -> str:
    with RunWriter.create(
        path,
        token=np.arange(tokens),
        hidden=2,
        variables={"W": "float32", "loss": "float32"},
        config={"training": {"seed": 1}, "optimizer": {"lr": lr}, "<b>": {"x": "<i>"}},
    ) as run:
        for step in range(6):
            W = np.full((tokens, 2), step, "f4")
            W[0, 0] += later * (step > 2)
            run.append(step, W=W, loss=np.float32("nan" if not step else 3 / step))
    return str(path)


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "<s>.zarr"),
        write(tmp_path / "same.zarr", lr=0.2),
        write(tmp_path / "other.zarr", later=0.5, lr=0.3),
        write(tmp_path / "wide.zarr", tokens=4, lr=0.4),
    ]
    few = [FIGURES[name] for name in ("loss", "freeze", "regimes", "divergence")]
    page = write_runs_report(runs, tmp_path / "page.html", check=True, figures=few).read_text()
    shown = page.replace("&lt;", "<").replace("&gt;", ">")
    assert f"lr=0.2: W equals that of {runs[0]} at every step, bit for bit." in shown
    assert (
        f"lr=0.3: W differs from that of {runs[0]} since step 3. At step 5, 16.7% of its "
        "elements differ; the distance is 0.5 (L2)."
    ) in shown
    assert "lr=0.4: not compared" in shown
    assert "They differ in lr, 4 complete" in shown
    assert "0.6000" in page, "the final loss"
    assert page.count("checksum: sound;") == 4
    assert page.count("<figure") == 2, "one run has no divergence"
    assert "token has length 3 and 4" in shown
    assert "<s>" not in page
    assert not re.search(r"<a |href|<script", page)
