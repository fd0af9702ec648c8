"""Types of 16-bit arrays, by variable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grammar_files import imported, stored, truth

from trajstore.errors import InvalidArgument

KNOWN = truth()
W = KNOWN.values["W"]
FINE = (W * 1.2345).astype("f2")  # float16 that no bfloat16 holds
FINE[0] = 0


def test_bits_of_one_variable(tmp_path: Path) -> None:
    arrays = {"W": W.astype("f2"), "v": FINE, "m": np.zeros_like(FINE)}
    ds, done = imported(tmp_path, arrays)
    (note,) = [note for note in done.notes if "--bits" in note]
    assert note.startswith("W, exp_avg: float16")
    assert "; --bits W=bfloat16 --bits exp_avg=bfloat16 stores" in note
    # Of all, it would make other numbers of the second moment.
    with pytest.raises(InvalidArgument, match=r"value of W is .* not every value of exp_avg_sq"):
        imported(tmp_path, arrays, bits="bfloat16")
    ds, done = imported(tmp_path, arrays, bits={"W": "bfloat16"})
    assert ds.W.attrs["native_dtype"] == "bfloat16"
    assert ds.exp_avg_sq.attrs["native_dtype"] == "float16"
    assert (ds.exp_avg_sq.values == FINE.astype("f4")).all()
    assert not any("exp_avg_sq" in note for note in done.notes)


def test_bits_in_one_array_and_numbers_in_another(tmp_path: Path) -> None:
    half = FINE.copy()
    arrays = {"W": stored(W, "uint16"), "m": half.view("u2"), "v": W, "g": stored(W, "float16")}
    arrays["g"][0] = 0
    ds, _ = imported(tmp_path, arrays, bits={"m": "float16", "grad": "float16", "*": "bfloat16"})
    types = {name: ds[name].attrs["native_dtype"] for name in ds.data_vars}
    assert types == {
        "W": "bfloat16", "grad": "float16", "exp_avg": "float16", "exp_avg_sq": "bfloat16"
    }  # fmt: skip
    assert (ds.exp_avg.values == half.astype("f4")).all()
    assert (ds.W.values == W).all()


def test_bits_of_other_types_are_refused(tmp_path: Path) -> None:
    for bits, message in (
        ({"W": "bfloat16"}, "--bits W=… applies to uint16 and float16, but W is float32"),
        ({"loss": "bfloat16"}, "--bits loss=… .* but the file holds no loss"),
        ({"W": "float8"}, "got bits 'float8'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            imported(tmp_path, {"W": W, "m": FINE}, bits=bits)
