"""Runs that cannot compute W and the moments store them as differences, and note the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import RunWriter
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_info import information
from trajstore.store.writing.new_run import check_encoding, compact_rule

ADAMW: dict[str, Any] = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
AT_RANDOM = ADAMW | {"hyperparameters": ADAMW["hyperparameters"] | {"rounding": "stochastic"}}
TYPES = {
    "W": "bfloat16", "grad": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float32",
    "lr": "float64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "types", "reason"),
    [
        ({}, {}, "the run does not name its optimizer"),
        ({"optimizer": {"class": "my.Lion"}}, {}, "no rule is known for the optimizer 'my.Lion'"),
        ({"optimizer": AT_RANDOM}, {}, "the optimizer 'torch.optim.adamw.AdamW' rounds at random"),
        ({"recording": {"every": 5}}, {}, "the run is recorded every 5 steps"),
        ({}, {"grad": None, "exp_avg": None}, "the run does not hold exp_avg, grad"),
        ({}, {"exp_avg": "float64"}, "exp_avg are float64"),
    ],
)
def test_a_note_says_why_rows_are_stored_as_differences(
    attributes: dict[str, Any], types: dict[str, str | None], reason: str
) -> None:
    given = attributes if reason.endswith("its optimizer") else {"optimizer": ADAMW} | attributes
    held = {name: native for name, native in (TYPES | types).items() if native}
    notes: list[str] = []
    assert compact_rule(given, held, notes.append) is None
    assert notes == [f"W and the moments are stored as differences, not computed: {reason}"]


def test_without_a_function_the_note_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.zarr"
    with (
        caplog.at_level(logging.WARNING),
        RunWriter.create(
            path, token=range(3), hidden=2, variables={"W": "float32"}, encoding="compact"
        ) as run,
    ):
        run.append(0, W=np.ones((3, 2), np.float32))
    assert "the run does not name its optimizer" in caplog.text
    facts = information(path)
    assert facts["encoding"] == "compact"
    assert facts["arrays"]["W"]["kind"] == "delta"


def test_several_processes_cannot_write_the_encoding_compact() -> None:
    with pytest.raises(InvalidArgument, match=r"several processes write.* encoding='compact'"):
        check_encoding("compact", shared=True)
