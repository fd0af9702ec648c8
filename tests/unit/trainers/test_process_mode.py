"""What is computed again has the modes of the recording, and the reader keeps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from bits_and_calls import nightly_but  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.trainers import capture, preset, prove, record, replay, what_if  # noqa: E402
from trajstore.trainers.process_mode import process_mode, process_modes  # noqa: E402

pytestmark = pytest.mark.torch

FLUSHING: dict[str, Any] = {"flush_denormal": True}
STEPS = 60
SMALL = [
    "training.steps=3", "training.batch_size=2", "model.context=8", "model.layers=1",
    "model.hidden=8", "training.device=cpu", "recording.variables=everything",
]  # fmt: skip


def train(path: Path, encoding: str) -> list[Any]:
    """Record moments that decay to subnormal numbers, and return them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.1, 0.9))
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
    config = preset("gatsby").with_values([*SMALL, "model.dtype=float32"])
    with process_mode(1, modes):
        path = record(config, tmp_path / "run.zarr")
    for reader in ({}, modes):
        with process_mode(1, reader):
            found = prove(path)
            assert (found.clean, found.proven) == (True, 3)
            assert process_modes() == reader
    notes: list[str] = []
    longer = config.with_values(["training.steps=4"])
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
