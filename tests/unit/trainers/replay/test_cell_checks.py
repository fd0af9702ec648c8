from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from altered_runs import flip  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402

from trajstore.trainers.replay.replay import replay  # noqa: E402

pytestmark = pytest.mark.torch


def test_recorded_cells_are_held_against_W(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", record=("all", "cells"))
    found = replay(path)
    assert found.clean
    assert found.variables["cells"].differing == 0
    assert found.variables["cells"].steps == found.steps + 1
    flip(path, "cells", (3, 1, 2), 4)
    found = replay(path)
    (finding,) = found.findings
    assert (finding.variable, finding.step, finding.kind) == ("cells", 3, "altered")
    assert finding.others == ("W at step 3",)
    assert found.variables["cells"].differing == 1
