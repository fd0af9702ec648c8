"""Lists of ids in another file: ids of the rows, or of the dead tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_files import stored, truth, write

import trajstore
from trajstore.errors import FormatError

W = stored(truth().values["W"], "float32")  # rows of 7 tokens
IDS = np.array([3, 1, 4, 15, 9, 2, 6])


def imported(tmp_path: Path, name: str, ids: np.ndarray, **arrays: Any) -> Any:
    np.save(tmp_path / f"{name}.npy", ids)
    file = write(tmp_path / "file", "npz", {"W": W} | arrays)
    done = trajstore.import_file(file, tmp_path / "run.zarr", masks=tmp_path / f"{name}.npy")
    return trajstore.open_run(done.path), done


def test_token_ids_are_the_ids_of_the_rows(tmp_path: Path) -> None:
    ds, done = imported(tmp_path, "token_ids", IDS)
    assert ds.token.values.tolist() == IDS.tolist()
    assert "is_dead" not in ds.coords
    assert (ds.W.values == W).all()
    note = "token_ids of token_ids.npy: the ids of the rows, since the lengths match"
    assert note in done.notes


def test_token_ids_of_another_number_are_not_taken_for_the_dead(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"lists 3 tokens, but there are rows of 7.* dead_ids"):
        imported(tmp_path, "token_ids", IDS[:3])


@pytest.mark.parametrize(("name", "dead"), [("dead_ids", True), ("live_ids", False)])
def test_dead_ids_are_the_dead_tokens(tmp_path: Path, name: str, dead: bool) -> None:
    ds, _ = imported(tmp_path, name, np.array([5, 1]))
    assert ds.token.values.tolist() == list(range(7))
    assert np.flatnonzero(ds.is_dead.values == dead).tolist() == [1, 5]


def test_ids_without_a_known_name_are_the_dead_tokens(tmp_path: Path) -> None:
    ds, done = imported(tmp_path, "mine", np.array([5, 1]))
    assert np.flatnonzero(ds.is_dead.values).tolist() == [1, 5]
    note = "mine of mine.npy: ids without a known name, taken as the dead tokens"
    assert note in done.notes
