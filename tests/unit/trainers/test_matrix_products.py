"""Products of 16-bit matrices in float32: the same rule, everywhere in a run that chose it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from trainings import TinyModel, batches  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.trainers import (  # noqa: E402
    capture,
    evaluate,
    float32_products,
    fork,
    preset,
    prove,
    record,
    recorded_config,
)
from trajstore.trainers.matrix_products import modes_of_products, native_is_slow  # noqa: E402

pytestmark = pytest.mark.torch

SLOW = "trajstore.trainers.matrix_products.native_is_slow"
TINY = (
    "model.hidden=16", "model.context=8", "model.layers=1", "training.batch_size=4",
    "training.steps=4",
    "recording.variables=[\"everything\"]", "training.device=cpu",
)  # fmt: skip


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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_backward_passes_follow_the_same_rule(kind: Any) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    native, wide = (gradients(model, enabled, kind) for enabled in (False, True))
    for name, gradient in native.items():
        scale = gradient.abs().max()
        assert (wide[name] - gradient).abs().max() <= 8 * torch.finfo(kind).eps * scale, name


def test_attention_follows_the_same_rule() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(2, 2, 9, 8).bfloat16().requires_grad_() for _ in range(3)]

    def attend() -> list[Any]:
        attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return [attended, *torch.autograd.grad(attended.float().sum(), parts)]

    native = attend()
    with float32_products():
        wide = attend()
    for one, other in zip(native, wide, strict=True):
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_inference_mode_follows_the_same_rule() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
    states, heads = torch.randn(64, 256).bfloat16(), torch.randn(1, 4, 64, 32).bfloat16()

    def computed() -> list[Any]:
        attend = torch.nn.functional.scaled_dot_product_attention
        return [layer(states), states @ layer.weight.T, attend(heads, heads, heads)]

    with float32_products(), torch.no_grad():
        expected = computed()
    with float32_products(), torch.inference_mode():
        found = computed()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_compiled_models_are_the_same_inside(tiny: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tiny.bfloat16(), backend="eager")
    (batch,) = batches(1)
    with float32_products():
        assert torch.equal(compiled(**batch)["loss"], tiny(**batch)["loss"])
    assert not modes_of_products()


def products_in_use(model: Any, step: int) -> dict[str, float]:
    return {"blocks": float(modes_of_products())}


@pytest.mark.nightly
def test_a_run_keeps_its_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that repeats steps uses the recorded choice, whatever the machine would choose."""
    config = preset("gatsby").with_values(TINY)
    paths = [tmp_path / "float32.zarr", tmp_path / "native.zarr", tmp_path / "part.zarr"]
    wide, native, part = paths
    for path in paths:
        notes: list[str] = []
        chosen = "native" if path == native else "float32"
        monkeypatch.setattr(SLOW, lambda kind, slow=path != native: slow)
        steps = "training.steps=2" if path == part else "training.steps=4"
        record(config.with_values([steps, "schedule.steps=4"]), path, on_products=notes.append)
        assert any(f"Products of matrices: {chosen}" in note for note in notes)
        assert recorded_config(path).training.products == chosen
    forked = fork(native, tmp_path / "fork.zarr", at=2)  # part.zarr was slow
    assert prove(native).clean
    monkeypatch.setattr(SLOW, lambda kind: False)
    record(config.with_values(["schedule.steps=4"]), part, resume=True)
    for one, other in ((wide, part), (native, forked)):
        assert open_run(one).W.equals(open_run(other).W)
    assert not open_run(wide).params_grad.equals(open_run(native).params_grad)
    assert prove(wide).clean
    evaluate(wide, products_in_use, tmp_path / "results.zarr", steps=[2])
    assert xr.open_zarr(tmp_path / "results.zarr").blocks.values.tolist() == [1]


def test_the_speed_of_products_is_measured() -> None:
    threads = torch.get_num_threads()
    assert native_is_slow(torch.int64)  # on every processor
    assert not native_is_slow(torch.float32)
    assert torch.get_num_threads() == threads


def test_a_loop_of_ones_own_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLOW, lambda kind: True)
    for inside in (False, True):
        torch.manual_seed(0)
        model = TinyModel(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        notes: list[str] = []
        path = tmp_path / "run.zarr"
        with (
            float32_products(inside),
            capture(model, optimizer, path, overwrite=True, on_note=notes.append),
        ):
            model(**batches(1)[0])["loss"].backward()
            optimizer.step()
        assert any("float32_products()" in note for note in notes) != inside
