"""What is recorded of all parameters, against a plain computation on copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from list_recorder import TinyModel, batches  # noqa: E402

from trajstore import export, import_file, open_run, verify  # noqa: E402
from trajstore.errors import InvalidArgument  # noqa: E402
from trajstore.schema import MODEL  # noqa: E402
from trajstore.trainers import capture  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ["embedding.weight", "mix.weight", "mix.bias"]  # the head is tied
STEPS = 6

Row = dict[str, np.ndarray[Any, Any]]


def wide(tensor: Any) -> np.ndarray[Any, Any]:
    copied: np.ndarray[Any, Any] = tensor.detach().double().numpy().copy()
    return copied


def expected(before: list[Any], now: list[Any], raw: list[Any], used: list[Any]) -> list[Row]:
    """One mapping for each parameter, in the same float64 arithmetic whatever its type."""
    found = []
    for old, new, gradient, consumed in zip(before, now, raw, used, strict=True):
        row: dict[str, Any] = dict.fromkeys(MODEL, np.nan)
        row["param_norm"] = np.linalg.norm(new)
        if gradient is not None:
            asked = consumed != 0
            row["param_grad_norm"] = np.linalg.norm(gradient)
            row["param_update_norm"] = np.linalg.norm(new - old)
            if asked.any():
                row["param_update_lost"] = (asked & (new == old)).sum() / asked.sum()
        found.append(row)
    return found


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_value_of_every_parameter_is_recorded(
    optimizer: str, dtype: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = TinyModel(dtype)
    model.frozen = torch.nn.Parameter(torch.full((3,), 2.0, dtype=dtype), requires_grad=False)
    model.unused = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))  # never gets a gradient
    model.zeros = torch.nn.Parameter(torch.zeros(2, dtype=dtype))  # gets one of zeros
    parameters = list(model.parameters())
    assert [name for name, _ in model.named_parameters()] == ["frozen", "unused", "zeros", *NAMES]
    made = OPTIMIZERS[optimizer]([p for p in parameters if p.requires_grad])
    rows = [expected([wide(p) for p in parameters], [wide(p) for p in parameters],
                     [None] * 6, [None] * 6)]  # fmt: skip
    with capture(model, made, tmp_path / "run.zarr", variables="norms", max_grad_norm=0.5) as run:
        for batch in batches(STEPS):
            made.zero_grad()
            before = [wide(p) for p in parameters]
            loss = model(**batch)["loss"] + (0 * model.zeros).sum()
            loss.backward()
            run.observe(loss=loss)
            raw = [None if p.grad is None else wide(p.grad) for p in parameters]
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            used = [None if p.grad is None else wide(p.grad) for p in parameters]
            made.step()
            rows.append(expected(before, [wide(p) for p in parameters], raw, used))
    ds = xr.open_zarr(tmp_path / "run.zarr").load()
    assert ds.parameter.values.tolist() == ["frozen", "unused", "zeros", *NAMES]
    # The change is formed in the parameters' own type.
    close = {"param_update_norm": 1e-3 if dtype == torch.bfloat16 else 1e-6}
    for name in MODEL:
        wanted = np.array([[of[name] for of in row] for row in rows])
        np.testing.assert_allclose(ds[name], wanted, rtol=close.get(name, 1e-6), atol=0)
        assert ds[name].dims == ("step", "parameter")
        assert ds[name].dtype == np.float32
    lost = ds.param_update_lost.sel(parameter=NAMES).values[1:]
    assert (lost > 0).any() == (dtype == torch.bfloat16)


def run_of(path: Path, *, variables: str = "norms", **options: Any) -> Path:
    torch.manual_seed(1)
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with capture(model, optimizer, path, variables=variables, block_rows=4, **options):
        for batch in batches(STEPS):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_without_a_learning_rate_no_update_was_meant(kind: Any, tiny: Any, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=kind(0.0))
    with capture(tiny, optimizer, tmp_path / "run.zarr", variables="norms"):
        for number, batch in enumerate(batches(2)):  # as warming up begins
            optimizer.param_groups[0]["lr"] = kind(float(number))
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            optimizer.step()
    ds = open_run(tmp_path / "run.zarr")
    assert np.isnan(ds.param_update_lost[1]).all()
    np.testing.assert_array_equal(ds.param_update_norm[1], 0)
    np.testing.assert_array_equal(ds.param_update_lost[-1], 0)


def test_only_named_variables_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trajstore.trainers.recording import device_summaries

    def refuse(*tensors: Any) -> None:
        raise AssertionError("a copy of the model was kept, and nobody asked for it")

    monkeypatch.setattr(device_summaries, "copy_each", refuse)
    ds = open_run(run_of(tmp_path / "run.zarr", variables="W,param_norm,param_grad_norm"))
    assert [name for name in MODEL if name in ds] == ["param_grad_norm", "param_norm"]
    assert "parameter" not in open_run(run_of(tmp_path / "other.zarr", variables="W,loss"))


def test_each_of_several_matrices_has_them(tmp_path: Path) -> None:
    run_of(tmp_path / "run.zarr", parameter=["embedding.weight", "mix.weight"])
    one, other = (
        open_run(tmp_path / f"run.{name}.zarr") for name in ("embedding.weight", "mix.weight")
    )
    xr.testing.assert_identical(one.param_norm.drop_attrs(), other.param_norm.drop_attrs())


def test_a_run_continues_with_the_same_model(tmp_path: Path) -> None:
    path = run_of(tmp_path / "run.zarr")
    model = TinyModel(torch.bfloat16)
    model.more = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(
            InvalidArgument, match=r"has 4 parameters, but .* has 3 .*embedding.weight, "
        ),
        capture(model, optimizer, path, variables="norms", resume=True, first_step=STEPS),
    ):
        pass


def test_files_and_back(tmp_path: Path) -> None:
    path = run_of(tmp_path / "run.zarr")
    file = export(path, tmp_path / "run.safetensors")
    again = import_file(file, tmp_path / "again.zarr").path
    copied = export(path, tmp_path / "copy.zarr", format="run", tokens=[1, 2], steps="::2").path
    part = export(path, tmp_path / "part.safetensors", variables="W,loss")
    ds = open_run(path).load()
    for name in MODEL:
        np.testing.assert_array_equal(open_run(again)[name], ds[name])
        np.testing.assert_array_equal(open_run(copied)[name], ds[name][::2])
    assert open_run(again).parameter.values.tolist() == NAMES
    assert "parameter" not in open_run(import_file(part, tmp_path / "few.zarr").path)
    for made in (path, again, copied):
        assert not verify(made).problems
    pytest.importorskip("h5py")
    hdf5 = export(path, tmp_path / "run.h5", format="hdf5")
    back = open_run(import_file(hdf5, tmp_path / "back.zarr").path)
    for name in MODEL:
        np.testing.assert_array_equal(back[name], ds[name])
    assert back.parameter.values.tolist() == NAMES
    (path / "parameter" / "c.0").write_bytes(b"damaged")
    assert [problem.array for problem in verify(path).problems if problem.array] == ["parameter"]
