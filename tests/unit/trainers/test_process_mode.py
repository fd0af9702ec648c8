"""Modes of a process, and its products: steps are repeated with those of the recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from bits_and_calls import nightly_but
from small_trainings import small_config
from trainings import SmallGPT, TinyModel, batches

from trajstore import open_run
from trajstore.trainers import (
    capture,
    evaluate,
    float32_products,
    fork,
    prove,
    record,
    recorded_config,
    replay,
    what_if,
)
from trajstore.trainers.matrix_products import modes_of_products, native_is_slow
from trajstore.trainers.process_mode import process_mode, process_modes

FLUSHING: dict[str, Any] = {"flush_denormal": True}
STEPS = 30
GATSBY = ["gatsby", "recording.variables=everything"]


def train(path: Path, encoding: str) -> list[Any]:
    """Record moments that decay to subnormal numbers, and return them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.01, 0.9))
    told: dict[str, Any] = {"encoding": encoding, "token_count": torch.ones(9).int().numpy()}
    moments = []
    with capture(model, optimizer, path, parameter="0.weight", block_rows=16, **told):
        for step in range(STEPS):
            ids = torch.arange(9) % (9 if step < 3 else 2)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(ids), ids).backward()
            optimizer.step()
            moments.append(optimizer.state[model[0].weight]["exp_avg"].numpy().tobytes())
    return moments


@pytest.mark.parametrize("encoding", nightly_but(["delta", "compact"], "compact"))
@pytest.mark.parametrize(("writer", "reader"), [(FLUSHING, {}), ({}, FLUSHING)], ids=str)
def test_subnormal_numbers(
    writer: dict[str, Any], reader: dict[str, Any], encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.zarr"
    with process_mode(1, writer):
        moments = train(path, encoding)
    assert open_run(path).attrs["provenance"].get("modes", {}) == writer
    for modes in (writer, reader):
        with process_mode(1, modes):
            stored = open_run(path, chunks=None).exp_avg.values  # read in this thread
            assert [row.tobytes() for row in stored[1:]] == moments
            found = replay(path)
            assert (found.clean, found.replayed) == (True, STEPS)
            same = what_if(path, tmp_path / "same.zarr", [], overwrite=True)
            assert "no setting was changed; the result equals" in same.notes[-1]
            assert process_modes() == modes


def test_forward_and_backward_passes(tmp_path: Path) -> None:
    modes = {"default_dtype": "float64", "deterministic": 1, "flash_sdp": False}
    config = small_config(GATSBY, "model.dtype=float32", steps=2)
    with process_mode(1, modes):
        path = record(config, tmp_path / "run.zarr")
    for reader in ({}, modes):
        with process_mode(1, reader):
            found = prove(path)
            assert (found.clean, found.proven) == (True, 2)
            assert process_modes() == reader
    notes: list[str] = []
    longer = config.with_values(["training.steps=3"])
    record(longer, path, resume=True, on_note=notes.append)
    assert notes[0].startswith(f"modes was {modes} and is now None")
    assert prove(path).clean


@pytest.mark.parametrize("flushing", [True, "main thread", "other threads", False])
def test_all_threads_of_torch_get_their_mode(flushing: bool | str) -> None:
    """Those that have begun keep theirs, so new ones are started."""
    with process_mode(2):
        torch.ones(1 << 17) * 2
        before = process_modes()
        with process_mode(2, {"flush_denormal": flushing}):
            assert process_modes().get("flush_denormal", False) == flushing
        assert process_modes() == before


# Products of 16-bit matrices in float32 ---------------------------------------------------------


def gradients(model: Any, enabled: bool, kind: Any) -> dict[str, Any]:
    model.zero_grad()
    with float32_products(enabled), torch.autocast("cpu", kind):
        model(**batches(1)[0])["loss"].backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_product_is_rounded_once(kind: Any) -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(n, m).to(kind) for n, m in ((5, 70), (70, 6), (5, 6)))
    expected = (a.double() @ b.double()).to(kind)
    with float32_products():
        assert torch.equal(a @ b, expected)
        assert torch.equal((a[None] @ b[None])[0], expected)
        assert torch.equal(a @ b[:, 0], expected[:, 0])
        both = torch.addmm(c, a, b)
        assert (a.float() @ b.float()).dtype == torch.float32
    assert torch.equal(both, (c.double() + a.double() @ b.double()).to(kind))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(TinyModel, torch.bfloat16), (TinyModel, torch.float16), (SmallGPT, torch.bfloat16)],
)
def test_backward_passes_and_attention_follow_the_same_rule(make: Any, kind: Any) -> None:
    torch.manual_seed(0)
    model = make()
    native, wide = (gradients(model, enabled, kind) for enabled in (False, True))
    for name, gradient in native.items():
        scale = gradient.abs().max()
        assert (wide[name] - gradient).abs().max() <= 8 * torch.finfo(kind).eps * scale, name


def test_inference_mode_follows_the_same_rule() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
    states, heads = torch.randn(64, 256).bfloat16(), torch.randn(1, 4, 64, 32).bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        with float32_products(), mode():
            computed = layer(states), states @ layer.weight.T, attend(heads, heads, heads)
        found.append(computed)
    assert all(map(torch.equal, *found))


def test_compiled_models_are_the_same_inside(tiny: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tiny.bfloat16(), backend="eager")
    (batch,) = batches(1)
    with float32_products():
        assert torch.equal(compiled(**batch)["loss"], tiny(**batch)["loss"])
    assert not modes_of_products()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Choose what the machine is found to be."""

    def choose(is_slow: bool) -> None:
        name = "trajstore.trainers.matrix_products.native_is_slow"
        monkeypatch.setattr(name, lambda kind: is_slow)

    return choose


@pytest.mark.nightly
def test_a_run_keeps_its_products(tmp_path: Path, slow: Any) -> None:
    """All that repeats steps uses the recorded choice, whatever the machine would choose."""
    config = small_config(GATSBY, "schedule.steps=4", steps=4)
    paths = [tmp_path / "float32.zarr", tmp_path / "native.zarr", tmp_path / "part.zarr"]
    wide, native, part = paths
    for path in paths:
        notes: list[str] = []
        slow(path != native)
        steps = "training.steps=2" if path == part else "training.steps=4"
        record(config.with_values([steps]), path, on_products=notes.append)
        chosen = "native" if path == native else "float32"
        assert any(f"Products of matrices: {chosen}" in note for note in notes)
        assert recorded_config(path).training.products == chosen
    forked = fork(native, tmp_path / "fork.zarr", at=2)  # part.zarr was slow
    assert prove(native).clean
    slow(False)
    record(config, part, resume=True)
    for one, other in ((wide, part), (native, forked)):
        assert open_run(one).W.equals(open_run(other).W)
    assert not open_run(wide).params_grad.equals(open_run(native).params_grad)
    assert prove(wide).clean

    def products_in_use(model: Any, step: int) -> dict[str, float]:
        return {"blocks": float(modes_of_products())}

    evaluate(wide, products_in_use, tmp_path / "results.zarr", steps=[2])
    assert xr.open_zarr(tmp_path / "results.zarr").blocks.values.tolist() == [1]


def test_the_speed_of_products_is_measured() -> None:
    threads = torch.get_num_threads()
    assert native_is_slow(torch.int64)  # on every processor
    assert not native_is_slow(torch.float32)
    assert torch.get_num_threads() == threads


def test_a_loop_of_ones_own_is_advised(tmp_path: Path, slow: Any) -> None:
    slow(True)
    for inside in (False, True):
        torch.manual_seed(0)
        model = TinyModel(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        notes: list[str] = []
        with (
            float32_products(inside),
            capture(model, optimizer, tmp_path / f"{inside}.zarr", on_note=notes.append),
        ):
            model(**batches(1)[0])["loss"].backward()
            optimizer.step()
        assert any("float32_products()" in note for note in notes) != inside
