from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
from small_trainings import small_config

from trajstore.trainers.runs.retraining import recording_options
from trajstore.trainers.texts import load_corpus

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["recording.commit_every=2.5"], 2.5),
        (["recording.commit_every=0"], None),
    ],
)
def test_how_often_rows_are_committed_is_what_the_configuration_says(
    text: Path, changes: list[str], expected: float | None
) -> None:
    config = small_config(["gatsby"], *changes, steps=3)
    assert recording_options(config, load_corpus(config, corpus=text)).commit_every == expected
