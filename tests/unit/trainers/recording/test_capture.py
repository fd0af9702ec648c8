"""Every row that `capture` records, bit for bit what a list in the same process kept."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from disk import stand_in
from still_timer import StillTimer, commit_now
from trainings import (
    HIDDEN,
    VOCAB,
    Lists,
    Scaled,
    TinyModel,
    adamw,
    batches,
    steps,
    take_steps,
    trained,
)

from trajstore import open_run, verify
from trajstore.errors import InvalidArgument, RecordingError, RunExists, RunNotFound
from trajstore.trainers import attach, capture
from trajstore.trainers.recording import first_rows
from trajstore.values import norms


@pytest.mark.parametrize(
    ("clip", "named", "is_true", "dtype"),
    [
        (0.3, 0.3, True, torch.float32), (0.3, None, False, torch.bfloat16),
        (0.3, 0.2, False, torch.bfloat16), (0.3, 0, False, torch.float32),
        (1e6, 0, True, torch.float32),
    ],
)  # fmt: skip
def test_the_factor_of_clipping_is_found_from_the_gradients(
    clip: float, named: float | None, is_true: bool, dtype: Any, tiny: Any, optimizer: Any,
    path: Path,
) -> None:  # fmt: skip
    W, consumed = tiny.to(dtype).embedding.weight, list[Any]()
    optimizer.register_step_pre_hook(lambda *_: consumed.append(W.grad.float().clone()))
    options = {"max_grad_norm": named, "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    ds = trained(tiny, optimizer, path, clip=clip, **options).agree_with(path)
    assert "skipped" not in ds
    assert ds.attrs["optimizer"]["schedule"] == ({"max_grad_norm": named} if is_true else {})
    norm = torch.from_numpy(ds.grad_norm.values[1:]).to(dtype)
    factors = (clip / (norm + 1e-6)).clamp(max=1.0)
    np.testing.assert_array_equal(ds.clip_coef.values[1:], factors.float())
    scaled = torch.from_numpy(ds.grad.values[1:]).to(dtype) * factors[:, None, None]
    np.testing.assert_array_equal(scaled.float(), torch.stack(consumed))


# torch.compile itself looks at the .grad of its fake parameters.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("called_before", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_compiled_models(called_before: bool, tiny: Any, optimizer: Any, path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tiny, backend="eager" if called_before else "aot_eager")
    if called_before:
        compiled(**batches(1)[0])["loss"].backward()
    trained(compiled, optimizer, path).agree_with(path)


def test_a_tier_leaves_out_what_is_not_there_and_a_name_insists(tiny: Any, path: Path) -> None:
    def run(variables: Any) -> None:
        optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
        with capture(tiny, optimizer, path, variables=variables, strict=True):
            tiny(batches(1)[0]["input_ids"])["logits"].sum().backward()
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3)
            optimizer.step()

    message = r"batch not recorded.*observe\(batch=…\), or add a tensor example_index"
    with pytest.raises(RecordingError, match=message):
        run(("W", "batch"))
    assert not path.exists()
    run("weights")
    ds = open_run(path)
    assert set(ds) == {
        "W", "logits", "loss", "lr", "hyperparameters", "grad_norm", "clip_coef",
    }  # fmt: skip
    np.testing.assert_allclose(ds.clip_coef[1:], 0.3 / (ds.grad_norm[1:] + 1e-6), rtol=1e-6)


def test_without_a_block(tiny: Any, optimizer: Any, path: Path) -> None:
    lists, run = Lists(tiny.embedding.weight), attach(tiny, optimizer, path, every=2)
    take_steps(tiny, optimizer, lists=lists)
    run.close()
    run.close()  # nothing is open
    for rows in lists.rows.values():
        del rows[-3]
    ds = lists.agree_with(path)
    assert (ds.attrs["status"], ds.step.values.tolist()) == ("complete", [0, 2, 3])
    hooks = tiny._forward_hooks, tiny.head._forward_hooks, optimizer._optimizer_step_post_hooks
    assert not any(hooks)
    strict = attach(tiny, optimizer, path.with_name("strict.zarr"), strict=True)
    with pytest.raises(RecordingError, match="no step of AdamW was taken"):
        strict.close()


def test_calls_after_the_end(tiny: Any, path: Path) -> None:
    file, optimizer = path.with_name("last.pt"), torch.optim.SGD(tiny.parameters(), lr=0.01)

    def calls(run: Any) -> list[Callable[[], None]]:
        observe = functools.partial(run.observe, loss=torch.tensor(0.5))
        return [run.commit, observe, functools.partial(run.checkpoint, file, {"step": run.step})]

    with capture(tiny, optimizer, path) as run:
        take_steps(tiny, optimizer, 2)
    for call in calls(run):
        with pytest.raises(RecordingError, match=r"\(\) was called after .* inside the with block"):
            call()
    notes: list[str] = []
    with capture(tiny, optimizer, path, overwrite=True, on_note=notes.append) as run:
        take_steps(tiny, optimizer, 2)
        tiny.double()  # ends the recording, not the training
        take_steps(tiny, optimizer, 1)
        for call in calls(run):
            call()
    assert torch.load(file) == {"step": 2}
    ds = open_run(path)
    assert (ds.attrs["status"], ds.sizes["step"]) == ("interrupted", 3)
    assert any("recording ended in step 3" in note and "float64" in note for note in notes)


def test_a_recording_begins_with_the_current_moments_and_ends_with_a_whole_row(
    tiny: Any, optimizer: Any, path: Path
) -> None:
    take_steps(tiny, optimizer, 2)
    state = copy.deepcopy(optimizer.state[tiny.embedding.weight])

    def interrupted() -> None:
        with capture(tiny, optimizer, path, every=3, first_step=2):
            for number, _ in enumerate(steps(tiny, optimizer, 6)):
                if number == 5:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    ds = xr.open_zarr(path, chunks=None)
    assert ds.step.values.tolist() == [2, 3, 6]
    assert ds.attrs["status"] == "interrupted"
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].any()
        np.testing.assert_array_equal(ds[name][0], state[name])


@pytest.mark.parametrize(("tokens", "ids"), [("dead", [13, 14, 15, 16]), ([16, 3, 5], [3, 5, 16])])
def test_only_some_tokens(
    tokens: Any, ids: list[int], tiny: Any, optimizer: Any, path: Path
) -> None:
    dead = np.arange(VOCAB) >= 13
    lists = trained(tiny, optimizer, path, tokens=tokens, is_dead=dead, clip=0.3, max_grad_norm=0.3)
    for name in ("W", "grad", "exp_avg", "exp_avg_sq", "logits"):
        lists.rows[name] = [row[ids] for row in lists.rows[name]]
    ds = lists.agree_with(path)
    assert ds.token.values.tolist() == ids
    assert ds.is_dead.values.tolist() == [i >= 13 for i in ids]
    assert np.isfinite(ds.clip_coef.values[1:]).all()


def test_mean_logits_and_mean_hidden_state(tiny: Any, optimizer: Any, path: Path) -> None:
    tiny.bfloat16()
    means: dict[str, list[Any]] = {"logits": [], "hidden_mean": []}

    def keep(head: Any, given: Any, logits: Any) -> None:
        means["logits"].append(logits[:, -1].detach().mean(dim=0))
        means["hidden_mean"].append(given[0].detach().mean(dim=(0, 1), dtype=torch.float32))

    tiny.head.register_forward_hook(keep)
    options = {"variables": ("matrix", "hidden_mean"), "logits_mode": "mean"}
    lists = trained(tiny, optimizer, path, **options)
    lists.rows |= means
    ds = lists.agree_with(path)
    assert ds.hidden_mean.dims == ("step", "hidden")
    assert ds.attrs["recording"]["logits_mode"] == "mean"


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [(torch.bfloat16, "all"), (torch.float32, "all"), (torch.float16, [3, 5, 16])],
)
def test_summaries_and_cells_are_what_the_big_arrays_say(
    dtype: Any, tokens: Any, tiny: Any, path: Path
) -> None:
    optimizer = torch.optim.AdamW(tiny.to(dtype).parameters(), lr=0.01, eps=1e-4)
    variables = "matrix,cells,grad_token_norm,W_step_norm,W_ulp_l1"
    trained(tiny, optimizer, path, 4, variables=variables, tokens=tokens, every=2)
    ds = xr.open_zarr(path, chunks=None)
    before, now = ds.W.values[:-1], ds.W.values[1:]
    expected = {
        "grad_token_norm": norms.token_norm(ds.grad.values[1:]),
        "W_step_norm": norms.step_norm(before, now),
        "W_ulp_l1": norms.ulp_l1(before, now, ds.W.attrs["native_dtype"]),
    }
    for name, values in expected.items():
        assert np.isnan(ds[name].values[0]).all()
        assert (ds[name].values[1:] == values.astype(np.float32)).all(), name
        assert (values > 0).any()
    as_autocast = torch.from_numpy(ds.W.values).to(torch.bfloat16).float()
    np.testing.assert_array_equal(ds.cells, as_autocast)  # whatever the type of the weights
    assert ds.cells.attrs["native_dtype"] == "bfloat16"
    assert not verify(path).problems


def test_several_parameters_have_a_run_each(tiny: Any, optimizer: Any, tmp_path: Path) -> None:
    names = ["head.weight", "mix.weight", "embedding.weight"]  # two names of one
    options = {"parameter": names, "variables": "matrix,norms"}
    with torch.autocast("cpu", torch.bfloat16):
        lists = trained(tiny, optimizer, tmp_path / "run.zarr", **options)
    ds = lists.agree_with(tmp_path / "run.embedding.weight.zarr")
    types = [ds[name].attrs["native_dtype"] for name in ("W", "logits")]
    assert types == ["float32", "bfloat16"]
    other = xr.open_zarr(tmp_path / "run.mix.weight.zarr", chunks=None)
    xr.testing.assert_identical(ds.param_norm.drop_attrs(), other.param_norm.drop_attrs())
    assert other.W.shape == (4, HIDDEN, HIDDEN)
    assert np.array_equal(other.W.values[-1], tiny.mix.weight.detach().numpy())
    assert "logits" not in other
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "run.embedding.weight.zarr", "run.mix.weight.zarr",
    ]  # fmt: skip


def test_what_cannot_be_recorded_is_reported(tiny: Any, optimizer: Any, path: Path) -> None:
    def refused(error: type[Exception], message: str, model: Any = tiny, **options: Any) -> None:
        with pytest.raises(error, match=message), capture(model, optimizer, path, **options):
            pytest.fail("it was accepted")

    other = torch.nn.Sequential(torch.nn.Embedding(3, 2), tiny.mix)
    refused(RecordingError, r"no parameter 'head\.wait'.*head\.weight", parameter="head.wait")
    refused(RecordingError, r"mix\.bias has shape", parameter="mix.bias")
    refused(RecordingError, r"has no embedding that the optimizer.*0\.weight", other)
    refused(RecordingError, r"0\.weight is not in the opt", other, parameter="0.weight")
    message = "AdamW has none of the parameters of TinyModel"
    refused(RecordingError, message, TinyModel(), parameter="mix.weight")
    refused(InvalidArgument, "the dead tokens are not known", tokens="dead")
    refused(InvalidArgument, r"ids are not in the vocabulary \(17, 99\)", tokens=[1, 99, 17])
    none = {"tokens": "dead", "is_dead": np.zeros(VOCAB, bool)}
    refused(InvalidArgument, r"none of the .* tokens is dead", **none)
    tiny.embedding.weight.requires_grad_(False)
    refused(RecordingError, "requires_grad=False")
    path.mkdir()
    refused(RunExists, "exists")


@pytest.mark.parametrize(
    ("code", "steps"),  # after 9 steps it is found when the run is closed, after 30 in a step
    [
        (errno.ENOENT, 9), (errno.EACCES, 30), (errno.EMFILE, 30),
        (errno.EIO, 9), (errno.EROFS, 9), (errno.ENOSPC, 30),
    ],
)  # fmt: skip
def test_only_a_full_or_failed_disk_ends_a_training(
    code: int, steps: int, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(source: Any, target: Path) -> None:
        if target.name.startswith("c.2"):  # the third block of the run
            raise OSError(code, os.strerror(code), str(target))
        real(source, target)

    stand_in(monkeypatch, replace=replace)
    notes: list[str] = []
    ends = code in (errno.EIO, errno.EROFS, errno.ENOSPC)
    options = {"variables": "weights", "block_rows": 4, "on_note": notes.append}
    raised = pytest.raises((OSError, RecordingError)) if ends else contextlib.nullcontext()
    with raised as ended:
        lists = trained(tiny, torch.optim.SGD(tiny.parameters()), tmp_path / "run.zarr", steps,
                         **options)  # fmt: skip
        assert len(lists.rows["W"]) == steps + 1
    if code == errno.ENOSPC:
        ended.match("no space is left.*first 8 rows are committed; free")
    said = [note for note in notes if "the recording ended" in note]
    assert len(said) == (not ends or steps > 9)
    assert all(os.strerror(code) in note or ends for note in said)
    assert open_run(tmp_path / "run.zarr").step.values.tolist() == list(range(8))


def test_a_training_goes_on_when_the_folder_of_its_run_is_renamed(
    tiny: Any, tmp_path: Path
) -> None:
    path, notes, optimizer = tmp_path / "run.zarr", [], torch.optim.SGD(tiny.parameters())
    options = {"variables": "weights", "block_rows": 4}

    def loop(**others: Any) -> Any:
        with capture(tiny, optimizer, path, on_note=notes.append, **options, **others) as run:
            for step, _ in enumerate(steps(tiny, optimizer, 20)):
                if step == 9:
                    path.rename(tmp_path / "renamed.zarr")
        return run

    assert loop().has_failed
    ends = [re.match(r"the recording ended in step (\d+): .* was moved", note) for note in notes]
    assert [int(end[1]) <= 20 for end in ends if end] == [True]
    assert open_run(tmp_path / "renamed.zarr").sizes["step"] in (0, 4, 8)
    shutil.rmtree(tmp_path / "renamed.zarr")
    with pytest.raises(RunNotFound, match="was moved, removed or replaced"):
        loop(strict=True)


class Told(Scaled):
    """The loop says which examples it takes; `data` is made before the default device is set."""

    data = batches(6)

    def inputs(self, number: int) -> list[Any]:
        return [self.data[number]]

    def step(self, inputs: list[Any]) -> None:
        self.observe(batch=[3, 1, 4], example_loss=[0.5, 1.5, 2])
        super().step(inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"variables": "everything,norms"},
        {"variables": ["W", "W_step_norm", "W_ulp_l1", "grad_token_norm", "cells", "skipped",
                       "batch", "example_loss"], "tokens": [1, 5], "every": 2},
    ],
)  # fmt: skip
def test_the_default_device_of_torch_changes_nothing(options: Any, tmp_path: Path) -> None:
    recorded = []
    for device in ("meta", "cpu"):
        loop, path = Told(), tmp_path / f"{device}.zarr"
        loop.model(**batches(1)[0])["loss"].backward()
        loop.optimizers.step()  # its own number of steps would be on the default device
        torch.set_default_device(device)
        try:
            loop.train(path, first=1, last=6, **options)
        finally:
            torch.set_default_device(None)
        recorded.append(open_run(path, chunks=None).load())
    assert recorded[0].attrs["status"] == "complete"
    assert 0 < recorded[0].skipped.sum() < 5
    xr.testing.assert_identical(*(ds.drop_attrs() for ds in recorded))


def test_rows_in_transit_are_part_of_the_memory(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "memory_in_transit", lambda device, row: 5 << 20)
    adam = torch.optim.AdamW(tiny.parameters())
    with capture(tiny, adam, tmp_path / "run.zarr", memory="10MiB", strict=True) as run:
        take_steps(tiny, adam, 1)
        assert run.writer.layout.memory <= 5 << 20
    with (
        pytest.raises(InvalidArgument, match="rows in transit from cpu take 5 MiB, expect"),
        capture(tiny, adam, tmp_path / "other.zarr", memory="9MiB", strict=True),
    ):
        take_steps(tiny, adam, 1)


@pytest.mark.device
@pytest.mark.parametrize("tokens", ["all", [3, 16]])
def test_every_row_on_a_device(tokens: Any, accelerator: Any, tiny: Any, path: Path) -> None:
    tiny.bfloat16().to(accelerator)
    tiny.head.weight = tiny.embedding.weight
    lists = trained(tiny, adamw(tiny), path, 40, clip=0.3, max_grad_norm=0.3, tokens=tokens)
    ids = list(range(VOCAB)) if tokens == "all" else tokens
    for name, rows in lists.rows.items():
        lists.rows[name] = [row.cpu()[ids] if row.ndim else row.cpu() for row in rows]
    ds = lists.agree_with(path)
    assert np.isfinite(ds.clip_coef.values[1:]).all()


def test_its_rows_are_committed_by_time_also_when_it_continues(
    tiny: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the step in progress, which is in the block already, is no part of that."""
    StillTimer.install(monkeypatch)
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    lists = Lists(tiny.embedding.weight)

    def train(first: int, last: int, **options: Any) -> None:
        options = {"variables": "W,grad,loss", "commit_every": 3.0, **options}
        with capture(tiny, optimizer, path, **options) as run:
            each = steps(tiny, optimizer, last - first, seed=first, lists=lists)
            for number, _ in enumerate(each, first):
                if number > first:
                    commit_now(run.writer)
                    assert xr.open_zarr(path).step.values.tolist() == [*range(number + 1)]
            assert StillTimer.of(run.writer)._every == 3.0

    train(0, 3)
    train(3, 6, resume=True, first_step=3)
    del lists.rows["logits"]
    lists.agree_with(path)
