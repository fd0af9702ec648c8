from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trajstore.errors import FormatError, InvalidArgument
from trajstore.populations import populations_from


def test_populations_from_files(tmp_path: Path) -> None:
    mask = np.arange(8) == 2
    np.save(tmp_path / "mask.npy", mask)
    np.savez(tmp_path / "ids.npz", ids=np.array([4, 9]))
    (tmp_path / "ids.txt").write_text("0\n# a comment\n3 # another\n")
    given = [f"one={tmp_path}/mask.npy", f"two={tmp_path}/ids.npz", f"three={tmp_path}/ids.txt"]
    got = populations_from([*given, "four = token == 3"])
    assert got["one"].tolist() == mask.tolist()
    assert got["two"].tolist() == [4, 9]
    assert got["three"].tolist() == [0, 3]
    assert got["four"] == "token == 3"
    np.savez(tmp_path / "several.npz", a=mask, b=mask)
    np.save(tmp_path / "wide.npy", np.zeros((8, 2), bool))
    (tmp_path / "text.txt").write_text("three\n")
    for name in ("several.npz", "wide.npy", "text.txt"):
        with pytest.raises(FormatError, match=name):
            populations_from([f"one={tmp_path}/{name}"])


def test_what_is_no_population() -> None:
    for assignments in (["odd"], ["=token > 3"], ["a=token > 3", "a=token > 4"]):
        with pytest.raises(InvalidArgument, match="NAME=EXPRESSION"):
            populations_from(assignments)
    with pytest.raises(InvalidArgument, match=r"there is no file nowhere\.txt"):
        populations_from(["one=nowhere.txt"])
