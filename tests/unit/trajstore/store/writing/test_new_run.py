"""Runs that cannot compute W and the moments store them as differences, and note the reason."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from disk import moves

from trajstore import RunWriter, open_run
from trajstore.errors import InvalidArgument, RecordingError, RunExists
from trajstore.integrity.verify import verify
from trajstore.schema import OPTIMIZER_STATE
from trajstore.store.metadata.metadata_form import CONTENT
from trajstore.store.reading.run_info import information
from trajstore.store.writing.new_run import check_encoding, compact_rule
from trajstore.store.writing.resumed_run import TokenShare

ADAMW: dict[str, Any] = {
    "class": "torch.optim.adamw.AdamW",
    "hyperparameters": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
AT_RANDOM = ADAMW | {"hyperparameters": ADAMW["hyperparameters"] | {"rounding": "stochastic"}}
TYPES = {
    "W": "bfloat16", "grad": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float32",
    "lr": "float64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "types", "reason"),
    [
        ({}, {}, "the run does not name its optimizer"),
        ({"optimizer": {"class": "my.Lion"}}, {}, "no rule is known for the optimizer 'my.Lion'"),
        ({"optimizer": AT_RANDOM}, {}, "the optimizer 'torch.optim.adamw.AdamW' rounds at random"),
        ({"recording": {"every": 5}}, {}, "the run is recorded every 5 steps"),
        ({}, {"grad": None, "exp_avg": None}, "the run does not hold exp_avg, grad"),
        ({}, {"exp_avg": "float64"}, "exp_avg are float64"),
    ],
)
def test_a_note_says_why_rows_are_stored_as_differences(
    attributes: dict[str, Any], types: dict[str, str | None], reason: str
) -> None:
    given = attributes if reason.endswith("its optimizer") else {"optimizer": ADAMW} | attributes
    held = {name: native for name, native in (TYPES | types).items() if native}
    notes: list[str] = []
    assert compact_rule(given, held, notes.append) is None
    state = [name for name in ("W", "exp_avg", "exp_avg_sq") if name in held]
    assert notes == [f"compact stores {', '.join(state)} as differences: {reason}"]


def test_the_note_is_logged_once_or_passed_to_a_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.zarr"
    variables = {"W": "float32", "sum": "float32"}
    values = dict.fromkeys(variables, np.ones((3, 2), np.float32))
    with (
        caplog.at_level(logging.WARNING),
        RunWriter.create(
            path, token=range(3), hidden=2, variables=variables, encoding="compact",
            attributes={OPTIMIZER_STATE: [{"name": "sum", "of": "element"}]},
        ) as run,
    ):  # fmt: skip
        run.append(0, **values)
    note = "compact stores W, sum as differences: the run does not name its optimizer"
    assert caplog.messages == [note]
    facts = information(path)
    assert facts["encoding"] == "compact"
    assert facts["arrays"]["W"]["kind"] == "delta"
    notes: list[str] = []
    RunWriter.resume(path, lazy=True, on_note=notes.append).close()
    assert notes == []  # the run did not change
    with RunWriter.resume(path, lazy=True, on_note=notes.append) as run:
        run.append(1, **values)
    assert (notes, caplog.messages) == ([note], [note])


def test_several_processes_cannot_write_the_encoding_compact() -> None:
    with pytest.raises(InvalidArgument, match=r"several processes write.* encoding='compact'"):
        check_encoding("compact", shared=True)


# Writers that share in a run, each in a thread of its own in place of a process.

Result = TypeVar("Result")


class Meeting:
    """Where so many threads exchange what they say."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._said: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=20)

    def share(self, number: int) -> TokenShare:
        """That of one of them."""

        def exchange(value: Any) -> list[Any]:
            self._said[number] = value
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return TokenShare(number=number, count=self.count, exchange=exchange)


def all_together(count: int, work: Callable[[TokenShare], Result]) -> list[Result | BaseException]:
    """What so many threads return that do the same with their shares, or what they raise."""
    meeting = Meeting(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, meeting.share(number)) for number in range(count)]
    return [future.exception() or future.result() for future in futures]


TOKENS, HIDDEN, BLOCK = 11, 3, 4
VARIABLES = {"W": "float32", "grad": "bfloat16", "grad_token_norm": "float32", "loss": "float32"}

Row = dict[str, npt.NDArray[Any]]


def row(step: int, tokens: int = TOKENS) -> Row:
    random = np.random.default_rng(step)
    return {
        "W": random.standard_normal((tokens, HIDDEN), "f4"),
        "grad": random.integers(0, 1 << 14, (tokens, HIDDEN), "u2"),
        "grad_token_norm": random.standard_normal(tokens, "f4"),
        "loss": random.standard_normal((), "f4"),
    }


def own(share: TokenShare, whole: Row) -> Row:
    """What a writer has of a row."""
    tokens = share.tokens(len(whole["W"]))
    return {
        name: values[tokens] if values.ndim else values
        for name, values in whole.items()
        if values.ndim or share.is_first
    }


def create(path: Path, share: TokenShare, tokens: int = TOKENS, **options: Any) -> RunWriter:
    return RunWriter.create(
        path, token=np.arange(tokens), hidden=HIDDEN, variables=VARIABLES,
        **{"block_rows": BLOCK, **options}, share=share,
    )  # fmt: skip


def record(path: Path, share: TokenShare, steps: range, tokens: int = TOKENS) -> RunWriter:
    with create(path, share, tokens) as run:
        for step in steps:
            run.append(step, **own(share, row(step, tokens)))
    return run


def content(path: Path) -> str:
    digest: str = json.loads((path / "zarr.json").read_bytes())["attributes"][CONTENT]
    return digest


def whole_run(path: Path, of: Path, steps: range, tokens: int = TOKENS) -> str:
    """Content digest of the run that one writer makes, with blocks as those of another."""
    shutil.copytree(of, path)
    with RunWriter.resume(path, rows=0) as run:
        for step in steps:
            run.append(step, **row(step, tokens))
    return content(path)


# 2 processes with tokens of unequal number, 4 of which the last has none
@pytest.mark.parametrize(("count", "tokens"), [(2, 11), (4, 5)])
def test_the_run_of_several_is_the_run_of_one(tmp_path: Path, count: int, tokens: int) -> None:
    path, steps = tmp_path / "run.zarr", range(2 * BLOCK + 1)
    runs = all_together(count, lambda share: record(path, share, steps, tokens))
    assert [run.committed_rows for run in runs] == [len(steps)] * count  # type: ignore[union-attr]
    assert verify(path).clean
    ds = open_run(path)
    for step in steps:
        assert np.array_equal(ds.W.values[step], row(step, tokens)["W"])
    assert content(path) == whole_run(tmp_path / "whole.zarr", path, steps, tokens)


def test_each_holds_and_writes_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    first, second = all_together(2, lambda share: record(path, share, range(BLOCK)))
    assert isinstance(first, RunWriter)
    assert isinstance(second, RunWriter)
    assert "loss" in first.layout.arrays
    assert "loss" not in second.layout.arrays
    assert first.layout.arrays["W"].row == (6, HIDDEN)
    assert second.layout.arrays["W"].row == (5, HIDDEN)
    files = sum(
        file.stat().st_size for file in path.glob("*/c.0*") if file.parent.name in VARIABLES
    )
    files += (path / "step" / "c.0").stat().st_size
    assert first.bytes_written > second.bytes_written > 0
    assert first.bytes_written + second.bytes_written == files


def record_with_failure(
    path: Path, place: str, error: OSError, blocks: int
) -> list[RunWriter | BaseException]:
    """Record in two processes, of which one cannot put an object in its place."""
    move = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target) == path / place:
            raise error
        move(source, target)

    with moves(replace):
        return all_together(2, lambda share: record(path, share, range(blocks * BLOCK)))


def test_all_processes_stop_when_one_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    full = OSError(28, "No space left on device")
    # Of the second process, in the second block.
    first, second = record_with_failure(path, "W/c.1.1.0", full, 5)
    assert isinstance(second, OSError)
    assert second.errno == 28
    assert isinstance(first, RecordingError)
    assert str(first).startswith("the recording failed in process 1: OSError: [Errno 28]")
    ds = open_run(path)
    assert (ds.sizes["step"], ds.attrs["status"]) == (BLOCK, "interrupted")
    assert verify(path).clean


def test_all_processes_stop_when_the_first_cannot_commit(tmp_path: Path) -> None:
    broken = OSError(5, "Input/output error")
    first, second = record_with_failure(tmp_path / "run.zarr", "zarr.json", broken, 3)
    assert isinstance(first, OSError)
    assert isinstance(second, RecordingError)
    assert "process 0: OSError" in str(second)


def test_rows_that_not_all_have_are_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    ended = all_together(2, lambda share: record(path, share, range(BLOCK + 1 + share.number)))
    for error in ended:
        assert isinstance(error, RecordingError)
        assert "process 0 with 5 rows, complete, process 1 with 6 rows, complete" in str(error)
    ds = open_run(path)
    assert (ds.sizes["step"], ds.attrs["status"]) == (BLOCK, "interrupted")
    assert verify(path).clean


def test_a_run_that_is_there_is_refused_in_all(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    all_together(2, lambda share: record(path, share, range(2)))
    first, second = all_together(2, lambda share: create(path, share))
    assert isinstance(first, RunExists)
    assert isinstance(second, RecordingError)
    assert "process 0: RunExists" in str(second)


def test_a_folder_that_not_all_see_is_refused_in_all(tmp_path: Path) -> None:
    first, second = all_together(
        2, lambda share: create(tmp_path / str(share.number) / "run.zarr", share)
    )
    assert isinstance(second, InvalidArgument)
    assert "need a shared folder" in str(second)
    assert isinstance(first, RecordingError)
    assert not (tmp_path / "0" / "run.zarr").exists()


@pytest.mark.parametrize("kept", [2 * BLOCK - 1, 0])
def test_several_continue_with_the_run_of_several(tmp_path: Path, kept: int) -> None:
    path, steps = tmp_path / "run.zarr", range(3 * BLOCK)
    all_together(2, lambda share: record(path, share, range(2 * BLOCK + 1)))

    def go_on(share: TokenShare) -> int:
        with RunWriter.resume(path, rows=kept, share=share) as run:
            for step in range(kept, len(steps)):
                run.append(step, **own(share, row(step)))
        return run.committed_rows

    assert all_together(2, go_on) == [len(steps)] * 2
    assert verify(path).clean
    assert content(path) == whole_run(tmp_path / "whole.zarr", path, steps)


def test_another_number_continues_if_the_shards_fit(tmp_path: Path) -> None:
    path, tokens = tmp_path / "run.zarr", 12
    all_together(4, lambda share: record(path, share, range(BLOCK), tokens))

    def go_on(share: TokenShare) -> int:
        with RunWriter.resume(path, share=share) as run:
            run.append(BLOCK, **own(share, row(BLOCK, tokens)))
        return run.committed_rows

    assert all_together(2, go_on) == [BLOCK + 1] * 2
    assert verify(path).clean
    before = content(path)
    first, *_ = ended = all_together(3, go_on)
    assert isinstance(first, RecordingError)  # its own tokens begin with a shard
    assert all(isinstance(error, InvalidArgument) for error in ended[1:])
    assert "its shards hold 3 tokens, but each of 3 processes has 4" in str(ended[1])
    assert content(path) == before


def test_the_memory_is_that_of_each(tmp_path: Path) -> None:
    tokens = 60_000
    shares = all_together(
        4, lambda share: create(
            tmp_path / "run.zarr", share, tokens, block_rows=None, memory="100 MiB", threads=1
        )
    )  # fmt: skip
    for run in shares:
        assert isinstance(run, RunWriter)
        assert run.layout.memory <= 100 << 20
    all_together(4, lambda share: shares[share.number].close())  # type: ignore[union-attr]
