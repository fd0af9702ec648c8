"""A row on its way to the writer: right on any stream, in few operations, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from lazy_streams import OnDevice, Streams
from trainings import HIDDEN, VOCAB, launched

from trajstore import RunWriter
from trajstore.errors import RecordingError
from trajstore.trainers import capture
from trajstore.trainers.recording.device_to_host import DeferredTransfer, memory_in_transit

CUDA = torch.device("cuda")


def writer(path: Path) -> RunWriter:
    return RunWriter.create(
        path,
        token=np.arange(VOCAB),
        hidden=HIDDEN,
        variables={"W": "bfloat16", "loss": "float32"},
        block_rows=4,
    )


def test_a_failure_behind_the_back_of_training_is_raised_in_it(
    tmp_path: Path, use_streams: Any
) -> None:
    streams = Streams("none")
    streams.released.set()
    use_streams(streams)
    run = writer(tmp_path / "run.zarr")
    transfer = DeferredTransfer(run, CUDA)
    for number in range(2):  # a step must increase: the writer refuses
        transfer.put({"W": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)})
        transfer.put({"loss": torch.tensor(0.0)})
        transfer.commit(5)
        if number == 0:
            transfer.flush()
            assert run.rows == 1
    for call in (transfer.flush, transfer.close):
        with pytest.raises(RecordingError, match="the recording stopped: got step 5 after step 5"):
            call()
    assert not transfer._thread.is_alive()
    assert (transfer._slots, transfer._staging) == ([], None)
    run.close("interrupted")
    assert xr.open_zarr(tmp_path / "run.zarr").step.values.tolist() == [5]


def rows_are_right(
    path: Path, use_streams: Any, streams: Streams, steps: int, ids: Any = None
) -> bool:
    """Record a matrix of the device and a number of the host; compare each row with its step."""
    use_streams(streams)
    token = np.arange(VOCAB) if ids is None else ids.numpy()
    kept = []
    with RunWriter.create(
        path, token=token, hidden=HIDDEN, variables={"W": "float32", "loss": "float32"}
    ) as run:
        transfer = DeferredTransfer(run, CUDA)
        for step in range(steps):
            W = torch.full((VOCAB, HIDDEN), float(step)) + torch.arange(VOCAB)[:, None]
            chosen = W if ids is None else W[ids]
            transfer.put({"W": chosen.as_subclass(OnDevice)})
            loss = torch.tensor(float(step))
            transfer.put({"loss": loss})
            before = len(streams.training.work)
            transfer.put({"loss": loss})
            assert len(streams.training.work) == before  # the device has no part in it
            loss.mul_(2)  # as a loop may
            kept.append(W[token].numpy())
            transfer.commit(step)
        streams.released.set()
        transfer.close()
    ds = xr.open_zarr(path, chunks=None)
    assert ds.loss.values.tolist() == list(range(steps))
    return bool((ds.W.values == np.stack(kept)).all())


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5])], ids=["all", "some"])
@pytest.mark.parametrize("lazy", ["training", "copying", "none"])
def test_rows_are_right_on_late_streams(
    lazy: str, ids: Any, tmp_path: Path, use_streams: Any
) -> None:
    streams = Streams(lazy)
    streams.released.set()
    assert rows_are_right(tmp_path / "run.zarr", use_streams, streams, 11, ids)


@pytest.mark.parametrize(
    ("without", "lazy"),
    [("wait_event", "copying"), ("wait_stream", "training"), ("synchronize", "copying")],
)
def test_rows_are_wrong_without_any_one_of_the_waits(
    without: str, lazy: str, tmp_path: Path, use_streams: Any
) -> None:
    # As many rows as slots: the thread stores none before all are committed.
    for wait, right in ((None, True), (without, False)):
        path = tmp_path / f"{wait}.zarr"
        assert rows_are_right(path, use_streams, Streams(lazy, wait), 3) is right


def test_the_memory_in_transit_is_what_torch_takes(tmp_path: Path, use_streams: Any) -> None:
    lazy = use_streams(Streams("none"))
    row = [torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16), torch.empty(())]
    with writer(tmp_path / "run.zarr") as run:
        transfer = DeferredTransfer(run, CUDA)
        assert lazy.pinned == memory_in_transit(CUDA, row) > 3 * sum(value.nbytes for value in row)
        transfer.close()
    assert memory_in_transit(torch.device("mps"), row) == 0


def operations(path: Path, layers: int, *, clips: bool, tier: str) -> Any:
    """Return the names that the recorder launches in a step after the first ones, and how often.

    Each takes microseconds.
    """
    torch.manual_seed(0)
    hidden = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
    parts = torch.nn.Embedding(VOCAB, HIDDEN), *hidden, torch.nn.Linear(HIDDEN, VOCAB)
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    ids = torch.arange(12).view(2, 6)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    def in_a_step() -> Any:
        for _ in range(3):
            step()
        return launched(step)

    alone = in_a_step()
    options: dict[str, Any] = {"max_grad_norm": 0.1} if clips else {}
    with capture(model, optimizer, path, parameter="0.weight", variables=tier, **options):
        return in_a_step() - alone


@pytest.mark.parametrize(
    ("tier", "clips", "most"),
    [("matrix", False, 20), ("matrix", True, 30), ("everything", True, 60)],
)
def test_a_row_launches_few_operations_for_any_number_of_parameters(
    tier: str, clips: bool, most: int, tmp_path: Path
) -> None:
    few, many = (
        operations(tmp_path / f"{layers}.zarr", layers, clips=clips, tier=tier).total()
        for layers in (2, 12)
    )
    assert 5 < few == many <= most


def test_no_weights_are_copied_for_norms_that_need_none(tmp_path: Path) -> None:
    tier = "W,param_norm,param_grad_norm"
    found = operations(tmp_path / "run.zarr", 2, clips=True, tier=tier)
    assert found["aten::_foreach_copy_"] <= 1  # of the gradients
