"""Selections as torch tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import trajstore  # noqa: E402

pytestmark = pytest.mark.torch


def test_tensors_have_every_bit_and_own_their_memory(
    small_run: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, bits = small_run
    made = trajstore.to_torch(path)
    assert made["step"].tolist() == list(range(0, 21, 2))
    assert made["token"].tolist() == list(range(0, 70, 7))
    for name, dtype in {"W": torch.bfloat16, "grad": torch.float16, "loss": torch.float32}.items():
        assert made[name].dtype == dtype
        signed = {2: torch.int16, 4: torch.int32}[made[name].itemsize]
        assert (made[name].view(signed).numpy().view(bits[name].dtype) == bits[name]).all()
    ds = trajstore.open_run(path).load()
    before = ds.W.values.copy()
    made = trajstore.to_torch(ds, steps="4:12:4", tokens="dead", variables="W")
    assert set(made) == {"step", "token", "W"}
    W = made["W"]
    assert W.shape == (2, 4, 6)
    assert W.is_contiguous()
    # No view of something larger: a view would keep all of it alive.
    assert W.untyped_storage().nbytes() == W.numel() * 2
    assert (W.view(torch.int16).numpy().view("u2") == bits["W"][[2, 4]][:, [0, 3, 6, 9]]).all()
    W.zero_()
    assert (ds.W.values.view("u4") == before.view("u4")).all()
