from __future__ import annotations

import math
import os
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import trajstore
from trajstore.errors import FormatError, MissingExtra
from trajstore.formats.open_file import open_file


@pytest.mark.parametrize("in_zip", [True, False])
def test_tensors_in_dictionaries(tmp_path: Path, in_zip: bool) -> None:
    W = torch.arange(24).reshape(4, 3, 2).to(torch.bfloat16)
    content = {"W": W.transpose(0, 1), "deep": [{"steps": torch.arange(3)}], "lr": 1e-3, "tag": "x"}
    torch.save(content, tmp_path / "f.pt", _use_new_zipfile_serialization=in_zip)
    with open_file(tmp_path / "f.pt") as file:
        assert file.format == "torch"
        assert file.keys == ("W", "deep.0.steps")
        assert file.attributes == {"lr": 1e-3, "tag": "x"}
        assert (file.shape("W"), file.dtype("W")) == ((3, 4, 2), "bfloat16")
        expected = W.transpose(0, 1).contiguous().view(torch.int16).numpy().view("u2")
        assert (file.read("W", 1, 3) == expected[1:3]).all()
        assert (file.read("W", 0, 2, 1) == expected[1, 0:2]).all()


def test_a_checkpoint_is_one_row_and_a_tied_unembedding_counts_once(tmp_path: Path) -> None:
    W = torch.randn(5, 4).to(torch.bfloat16)
    for other, paths in ((W, ["run.zarr"]), (W + 1, ["run.E.zarr", "run.W.zarr"])):
        model = {"transformer.wte.weight": W, "lm_head.weight": other}
        content = {"step": 7, "model_state_dict": model, "optimizer_state_dict": {}}
        torch.save(content, tmp_path / "f.pt")
        done = trajstore.import_file(tmp_path / "f.pt", tmp_path / "run.zarr", overwrite=True)
        assert [one.path.name for one in (done, *done.others)] == paths
        ds = trajstore.open_run(done.path)
        assert ds.step.values.tolist() == [7]
        assert (ds.W.values[0] == W.float().numpy()).all()


def test_lists_that_grew_by_one_entry_a_step(tmp_path: Path) -> None:
    W = torch.randn(4, 5, 3)
    losses = [math.nan, 3.5, 2.25, 1.125]
    rule = {"dead_token_ids": [1, 4], "config": {"betas": (0.9, 0.95), "lr": 0.5}}
    forms = {
        "lists": {"W": list(W), "loss": losses, "steps": [0, 5, 10, 15]} | rule,
        "records": [
            {"W": w, "loss": loss, "step": 5 * at}
            for at, (w, loss) in enumerate(zip(W, losses, strict=True))
        ],
        "numbered": {"W": {5 * at: w for at, w in enumerate(W)}, "loss": torch.tensor(losses)},
    }
    for form, content in forms.items():
        torch.save(content, tmp_path / "f.pt")
        trajstore.import_file(tmp_path / "f.pt", tmp_path / f"{form}.zarr")
        ds = trajstore.open_run(tmp_path / f"{form}.zarr").load()
        assert ds.step.values.tolist() == [0, 5, 10, 15]
        assert (ds.W.values == W.numpy()).all()
        assert np.array_equal(ds.loss.values, losses, equal_nan=True)
        if form == "lists":
            assert np.flatnonzero(ds.is_dead.values).tolist() == [1, 4]
            given = ds.attrs["optimizer"]["hyperparameters"]
            assert (given["betas"], given["initial_lr"]) == ([0.9, 0.95], 0.5)


def test_tensors_that_are_not_read_and_why(tmp_path: Path) -> None:
    W = torch.randn(50, 30)
    unread = {
        "W": [W] * 100,
        "odd": torch.zeros(2, dtype=torch.cfloat),
        "sparse": torch.eye(3).to_sparse(),
        "wide": torch.zeros(1).expand(9),
    }
    torch.save({"embeddings": W, "betas": (0.9, 0.95)} | unread, tmp_path / "f.pt")
    with open_file(tmp_path / "f.pt") as file:
        assert file.keys == ("embeddings",)
        assert file.attributes == {"betas.0": 0.9, "betas.1": 0.95}
        assert file.unread == {
            "W": "a list that repeats one tensor, so earlier values are lost",
            "odd": "a tensor of type complex64",
            "sparse": "a tensor of layout sparse_coo on cpu",
            "wide": "a tensor that repeats its values, with strides of 0",
        }


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["TRAJSTORE_TEST_HARM"],)


def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJSTORE_TEST_HARM", str(tmp_path / "harm"))
    torch.save({"W": torch.zeros(3, 2, 2), "x": Harmful()}, tmp_path / "f.pt")
    (tmp_path / "g.pt").write_bytes(b"\x80\x02" + pickle.dumps(Harmful(), 2)[2:])
    for name in ("f.pt", "g.pt"):
        with pytest.raises(FormatError) as refused:
            trajstore.import_file(tmp_path / name, tmp_path / "run.zarr")
        assert "weights_only" not in str(refused.value)
        if name == "f.pt":
            assert str(refused.value).endswith("save a dictionary of its tensors")
    assert not (tmp_path / "harm").exists()


def test_damage_and_a_missing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "f.pt", "w") as file:
        file.writestr("f/data.pkl", b"\x80\x02N.")
    with pytest.raises(FormatError, match=r"torch cannot read .*f\.pt \(\d+ bytes\)"):
        open_file(tmp_path / "f.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"extra torch: .*; or save the tensors as saf"):
        open_file(tmp_path / "f.pt")
