"""Notes why a run stores differences, and runs that several processes write."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from disk import failing_moves

from trajstore import RunWriter, open_run
from trajstore.errors import InvalidArgument, RecordingError, RunExists
from trajstore.integrity.verify import verify
from trajstore.schema import OPTIMIZER_STATE
from trajstore.store.metadata.metadata_form import CONTENT
from trajstore.store.reading.run_info import information
from trajstore.store.writing.new_run import check_encoding, compact_rule
from trajstore.store.writing.resumed_run import ALONE, TokenShare

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


def all_together(count: int, work: Callable[[TokenShare], Result]) -> list[Result | BaseException]:
    """What so many threads return that do the same with their shares, or what they raise."""
    said: list[Any] = [None] * count
    barrier = threading.Barrier(count, timeout=20)

    def exchange(number: int, value: Any) -> list[Any]:
        said[number] = value
        barrier.wait()
        found = list(said)
        barrier.wait()
        return found

    with ThreadPoolExecutor(count) as pool:
        shares = [
            TokenShare(number=number, count=count, exchange=partial(exchange, number))
            for number in range(count)
        ]
        futures = [pool.submit(work, share) for share in shares]
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
    sizes: dict[str, Any] = {"token": np.arange(tokens), "hidden": HIDDEN, "block_rows": BLOCK}
    return RunWriter.create(path, variables=VARIABLES, share=share, **sizes | options)


def record(path: Path, share: TokenShare, rows: int, tokens: int = TOKENS) -> RunWriter:
    with create(path, share, tokens) as run:
        for step in range(rows):
            run.append(step, **own(share, row(step, tokens)))
    return run


def go_on(path: Path, share: TokenShare, first: int, rows: int, tokens: int = TOKENS) -> int:
    """Resume after the first rows, up to so many, and return how many are committed."""
    with RunWriter.resume(path, rows=first, share=share) as run:
        for step in range(first, rows):
            run.append(step, **own(share, row(step, tokens)))
    return run.committed_rows


def check(path: Path, rows: int, tokens: int = TOKENS) -> None:
    """Fail unless a run has so many rows, and the content of the run that one writer makes."""
    assert verify(path).clean
    values = open_run(path).W.values
    assert np.array_equal(values, [row(step, tokens)["W"] for step in range(rows)])
    whole = path.with_name("whole.zarr")
    shutil.copytree(path, whole)  # with blocks as it has them
    go_on(whole, ALONE, 0, rows, tokens)
    assert open_run(whole).attrs[CONTENT] == open_run(path).attrs[CONTENT]


# 2 processes with tokens of unequal number, 4 of which the last has none
@pytest.mark.parametrize(("count", "tokens"), [(2, 11), (4, 5)])
def test_the_run_of_several_is_the_run_of_one(tmp_path: Path, count: int, tokens: int) -> None:
    """Each holds and writes only its own."""
    path, rows = tmp_path / "run.zarr", 2 * BLOCK + 1
    runs = all_together(count, lambda share: record(path, share, rows, tokens))
    first, *others = (run for run in runs if isinstance(run, RunWriter))
    assert [run.committed_rows for run in (first, *others)] == [rows] * count
    assert "loss" in first.layout.arrays
    assert all("loss" not in run.layout.arrays for run in others)
    held = [run.layout.arrays["W"].row[0] for run in (first, *others) if "W" in run.layout.arrays]
    assert sum(held) == tokens
    assert max(held) == -(-tokens // count)
    written = [run.bytes_written for run in (first, *others)]
    files = [file for name in ("step", *VARIABLES) for file in (path / name).glob("c.*")]
    assert sum(written) == sum(file.stat().st_size for file in files)
    assert written[0] > written[1] > 0
    check(path, rows, tokens)


@pytest.mark.parametrize(
    ("place", "failing", "rows"),
    [
        ("W/c.1.1.0", 1, BLOCK),  # of the second process, in the second block
        ("zarr.json", 0, None),
    ],
)
def test_all_processes_stop_when_one_cannot_write(
    tmp_path: Path, place: str, failing: int, rows: int | None
) -> None:
    path = tmp_path / "run.zarr"
    with failing_moves(lambda target: target == path / place):
        ended = all_together(2, lambda share: record(path, share, 5 * BLOCK))
    failed, told = ended[failing], ended[1 - failing]
    assert isinstance(failed, OSError)
    assert failed.errno == 28
    assert isinstance(told, RecordingError)
    message = f"the recording failed in process {failing}: OSError: [Errno 28]"
    assert str(told).startswith(message)
    if rows is not None:
        ds = open_run(path)
        assert (ds.sizes["step"], ds.attrs["status"]) == (rows, "interrupted")
        assert verify(path).clean


def test_rows_that_not_all_have_are_not_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    ended = all_together(2, lambda share: record(path, share, BLOCK + 1 + share.number))
    for error in ended:
        assert isinstance(error, RecordingError)
        assert "process 0 with 5 rows, complete, process 1 with 6 rows, complete" in str(error)
    ds = open_run(path)
    assert (ds.sizes["step"], ds.attrs["status"]) == (BLOCK, "interrupted")
    assert verify(path).clean


def test_what_one_refuses_is_refused_in_all(tmp_path: Path) -> None:
    """A run that is there, and folders that not all see."""
    path = tmp_path / "run.zarr"
    all_together(2, lambda share: record(path, share, 1))
    first, second = all_together(2, lambda share: create(path, share))
    assert isinstance(first, RunExists)
    assert isinstance(second, RecordingError)
    assert "process 0: RunExists" in str(second)
    first, second = all_together(
        2, lambda share: create(tmp_path / str(share.number) / "run.zarr", share)
    )
    assert isinstance(second, InvalidArgument)
    assert "need a shared folder" in str(second)
    assert isinstance(first, RecordingError)
    assert not (tmp_path / "0" / "run.zarr").exists()


@pytest.mark.parametrize("kept", [2 * BLOCK - 1, 0])
def test_several_continue_with_the_run_of_several(tmp_path: Path, kept: int) -> None:
    path, rows = tmp_path / "run.zarr", 2 * BLOCK + 2
    all_together(2, lambda share: record(path, share, 2 * BLOCK + 1))
    assert all_together(2, lambda share: go_on(path, share, kept, rows)) == [rows] * 2
    check(path, rows)


def test_another_number_continues_if_the_shards_fit(tmp_path: Path) -> None:
    path, tokens, rows = tmp_path / "run.zarr", 12, BLOCK + 1
    all_together(4, lambda share: record(path, share, BLOCK, tokens))
    assert all_together(2, lambda share: go_on(path, share, BLOCK, rows, tokens)) == [rows] * 2
    check(path, rows, tokens)
    before = open_run(path).attrs[CONTENT]
    first, *ended = all_together(3, lambda share: go_on(path, share, rows, rows, tokens))
    assert isinstance(first, RecordingError)  # its own tokens begin with a shard
    assert all(isinstance(error, InvalidArgument) for error in ended)
    assert "its shards hold 3 tokens, but each of 3 processes has 4" in str(ended[0])
    assert open_run(path).attrs[CONTENT] == before


def test_the_memory_is_that_of_each(tmp_path: Path) -> None:
    options = {"block_rows": None, "memory": "100 MiB", "threads": 1}
    shares = all_together(4, lambda share: create(tmp_path / "run.zarr", share, 60_000, **options))
    for run in shares:
        assert isinstance(run, RunWriter)
        assert run.layout.memory <= 100 << 20
    all_together(4, lambda share: shares[share.number].close())  # type: ignore[union-attr]
