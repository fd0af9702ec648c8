"""A training recorded in the encoding `compact` is, bit for bit, the one recorded in `delta`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import xarray as xr
from bits_and_calls import nightly_but

torch = pytest.importorskip("torch")
from compact_runs import RULE_ARRAYS  # noqa: E402
from list_recorder import TinyModel, batches  # noqa: E402
from small_trainings import same_values, small_config, stop_after  # noqa: E402
from stored_forms import stored_forms  # noqa: E402

from trajstore import export, verify  # noqa: E402
from trajstore.errors import ConfigError, InvalidArgument  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import TrajectoryCallback, capture, fork, record  # noqa: E402
from trajstore.trainers.counterfactuals.what_if import what_if  # noqa: E402
from trajstore.trainers.replays.replay import replay  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, COMPACT = 10, "recording.encoding=compact"
QUICK = ("trainer", "adam, decay, dead tokens", "skipped steps")
VARIANTS = {
    "trainer": (["gatsby"], RULE_ARRAYS),
    "adam, decay, dead tokens": (
        ["gatsby-adam", "optimizer.weight_decay=0.1", "recording.tokens=dead"], RULE_ARRAYS,
    ),
    "float32, sgd": (["gatsby", "model.dtype=float32", "optimizer.name=sgd"], ("W",)),
    "float32 moments": (["gatsby", "optimizer.state_dtype=float32"], RULE_ARRAYS),
    "skipped steps": (
        ["gatsby-adam", "training.autocast=float16", "model.dtype=float32",
         "initialization.kind=normal", "initialization.sigma=30", "optimizer.lr=1"], RULE_ARRAYS,
    ),
    "without gradients": (["gatsby", "recording.variables=['weights']"], ()),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(VARIANTS, *QUICK))
def test_both_encodings_hold_the_same_bits(name: str, text: Path, tmp_path: Path) -> None:
    variant, computed = VARIANTS[name]
    plain, stopped = tmp_path / "plain.zarr", tmp_path / "compact.zarr"
    config = small_config(variant, steps=STEPS)
    record(config, plain, corpus=text)
    if name == "skipped steps":
        assert xr.open_zarr(plain).skipped.values[1:].any()
    notes: list[str] = []
    compact = config.with_values([COMPACT])
    record(compact, stopped, corpus=text, stop=stop_after(6), on_note=notes.append)
    kinds = {name: array["kind"] for name, array in information(stopped)["arrays"].items()}
    assert tuple(name for name in kinds if kinds[name] == "computed") == computed
    assert sum("stored as differences" in note for note in notes) == (not computed)
    notes.clear()
    record(compact, stopped, corpus=text, resume=True, on_note=notes.append)
    assert not any("stored as differences" in note for note in notes)
    same_values(plain, stopped)
    assert verify(stopped).clean
    back = tmp_path / "back.zarr"
    export(stopped, back, encoding="delta")
    same_values(plain, back)
    if name in ("trainer", "float32 moments"):
        forms = [stored_forms(stopped)[name] for name in computed]
        assert all(not form["differences"] and not form["corrected"] for form in forms)


def test_skipped_steps_do_not_count(tmp_path: Path) -> None:
    """3 of 20, in two blocks; the scaler's optimizer counts 17."""
    path = tmp_path / "run.zarr"
    torch.manual_seed(1)
    model = TinyModel(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with capture(model, optimizer, path, scaler=scaler, encoding="compact", block_rows=8):
        for number, batch in enumerate(batches(20)):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            scaler.scale(loss * (math.inf if number in (0, 5, 12) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert xr.open_zarr(path).skipped.sum() == 3
    for name in RULE_ARRAYS:
        form = stored_forms(path)[name]
        assert (form["differences"], form["corrected"]) == (0, 0), name


def test_a_fork_and_a_what_if_keep_the_encoding(text: Path, tmp_path: Path) -> None:
    config = small_config(["gatsby"], steps=STEPS)
    runs = {}
    for encoding in ("delta", "compact"):
        path = tmp_path / f"{encoding}.zarr"
        record(config.with_values([f"recording.encoding={encoding}"]), path, corpus=text)
        betas = ["optimizer.betas=[0.8, 0.99]"]
        forked = fork(path, tmp_path / f"{encoding}-fork.zarr", at=6, settings=betas)
        what_if(path, tmp_path / f"{encoding}-what-if.zarr", betas)
        runs[encoding] = (path, forked, tmp_path / f"{encoding}-what-if.zarr")
        assert replay(forked).clean
    for plain, compact in zip(*runs.values(), strict=True):
        ds = same_values(plain, compact)
        assert ds.attrs["encoding"] == "compact"
        assert verify(compact).clean
    for path, beta in zip(runs["compact"], (0.9, 0.8, 0.8), strict=True):
        metadata = json.loads((path / "W" / "zarr.json").read_bytes())
        assert metadata["codecs"][0]["configuration"]["rule"]["optimizer"]["beta1"] == beta
    with pytest.raises(ConfigError, match=r"recording\.encoding cannot change at a fork"):
        fork(runs["delta"][0], tmp_path / "no.zarr", at=6, settings=[COMPACT])
    with pytest.raises(ConfigError, match=r"recording\.encoding"):
        record(config.with_values([COMPACT]), runs["delta"][0], corpus=text, resume=True)


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="encoding='zip', expected 'delta' or 'compact'"):
        TrajectoryCallback(tmp_path / "run.zarr", encoding="zip")
