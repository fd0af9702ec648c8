"""Runs of one content have one digest, and any difference is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore import RunWriter, verify
from trajstore.exchange.export_run import branch_run
from trajstore.store.metadata.metadata_form import CONTENT, FINGERPRINT, block_digest

BLOCK = 4
TYPES = {"W": "bfloat16", "loss": "float64"}
Digests = tuple[str, str]


def row(step: int, bit: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "W": random_bits((5, 3), step) ^ np.uint16(bit),
        "loss": np.float64(step) / 3,
    }


def create(path: Path, **options: Any) -> RunWriter:
    arguments: dict[str, Any] = {
        "token": np.arange(5) * 3,
        "hidden": 3,
        "variables": TYPES,
        "block_rows": BLOCK,
        "token_count": np.arange(5),
    }
    return RunWriter.create(path, **arguments | options)


def recorded(
    path: Path, rows: int, *, change: dict[int, Any] | None = None, **options: Any
) -> Path:
    with create(path, **options) as run:
        for step in range(rows):
            run.append(**row(step) | (change or {}).get(step, {}))
    return path


def digests(path: Path) -> Digests:
    attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
    return attributes[CONTENT], attributes[FINGERPRINT]


def content(path: Path) -> str:
    return digests(path)[0]


def test_equal_content_has_one_digest_and_each_run_its_own_fingerprint(tmp_path: Path) -> None:
    one, other = (recorded(tmp_path / name, 10) for name in ("1", "2"))
    assert content(one) == content(other)
    assert digests(one)[1] != digests(other)[1]
    assert verify(one).clean


def test_it_does_not_depend_on_threads_and_memory(tmp_path: Path) -> None:
    one = recorded(tmp_path / "1", 10)
    assert content(recorded(tmp_path / "2", 10, threads=3, buffers=1)) == content(one)


@pytest.mark.parametrize(
    "options",
    [
        {"change": {0: row(0, bit=1)}},
        {"change": {9: row(9, bit=1 << 15)}},
        {"change": {5: {"loss": np.nextafter(5 / 3, 2)}}},
        {"change": {9: {"step": 10}}},
        {"token": np.arange(5) * 3 + 1},
        {"token_count": np.arange(5) + 1},
        {"token_count": None},
        {"is_dead": np.arange(5) == 2},
        {"block_rows": 5},
        {"variables": TYPES | {"W": "float16"}},
    ],
)
def test_any_difference_changes_the_digest(tmp_path: Path, options: dict[str, Any]) -> None:
    assert content(recorded(tmp_path / "1", 10)) != content(recorded(tmp_path / "2", 10, **options))


def test_a_configuration_is_no_content_but_in_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.store.writing.new_run.new_identity", lambda: "5a" * 16)
    monkeypatch.setattr(
        "trajstore.store.writing.new_run.utc_now", lambda: "2026-01-01T00:00:00+00:00"
    )
    one, same, other = (
        recorded(tmp_path / str(number), 3, config={"lr": lr})
        for number, lr in enumerate((0.1, 0.1, 0.2))
    )
    assert digests(one) == digests(same)
    assert content(other) == content(one)
    assert digests(other)[1] != digests(one)[1]


def history(path: Path, rows: int) -> list[Digests]:
    """Digests at each commit, of a run that is closed and gone on with after each row."""
    create(path).close()
    found = [digests(path)]
    for step in range(rows):
        with RunWriter.resume(path) as run:
            run.append(**row(step))
        found.append(digests(path))
    return found


def test_it_changes_with_each_row_and_going_on_ends_in_the_same(tmp_path: Path) -> None:
    found = history(tmp_path / "often.zarr", 10)
    assert len(set(found)) == 11
    for rows in (0, 3, 4, 5, 8, 10):
        assert content(recorded(tmp_path / f"{rows}.zarr", rows)) == found[rows][0]


def test_a_run_that_is_cut_has_the_digests_that_it_had_at_that_row(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    had = history(path, 10)
    for rows in (10, 9, 8, 5, 4, 3, 0):
        run = RunWriter.resume(path, rows=rows)
        assert digests(path) == had[rows]  # while it is being recorded again, too
        run.close()
        assert digests(path) == had[rows]
        assert verify(path).clean


def branch(source: Path, rows: int, **types: str) -> Path:
    path = source.with_name(f"branch-{rows}.zarr")
    branch_run(source, path, rows, types=TYPES | types, attributes={}, memory="64MiB")
    return path


@pytest.mark.parametrize("rows", [3, 4, 6, 8])
def test_a_branch_has_the_content_and_an_identity_of_its_own(tmp_path: Path, rows: int) -> None:
    source = recorded(tmp_path / "source.zarr", 10)
    before = digests(source)
    path = branch(source, rows)
    assert content(path) == content(recorded(tmp_path / "cut.zarr", rows))
    assert digests(source) == before
    assert digests(path)[1] != digests(cut(source, rows))[1]
    with RunWriter.resume(path) as run:
        for step in range(rows, 10):
            run.append(**row(step))
    assert content(path) == before[0]
    runs = json.loads((path / "zarr.json").read_bytes())["attributes"]["runs"]
    assert len(runs) == 2
    assert runs[-1][0] == -(-rows // BLOCK)
    assert verify(path).clean


def cut(path: Path, rows: int) -> Path:
    RunWriter.resume(path, rows=rows).close()
    return path


def test_a_branch_of_a_branch_knows_all_whose_blocks_it_has(tmp_path: Path) -> None:
    source = recorded(tmp_path / "source.zarr", 10)
    first = branch(source, 6)
    with RunWriter.resume(first) as run:
        for step in range(6, 13):
            run.append(**row(step))
    second = branch(first, 12)
    runs = [
        json.loads((path / "zarr.json").read_bytes())["attributes"]["runs"]
        for path in (source, first, second)
    ]
    assert [block for block, _ in runs[2]] == [0, 2, 3]
    assert runs[2][:2] == runs[1]
    assert runs[1][0] == runs[0][0]
    assert len({run for _, run in runs[2]}) == 3
    assert content(second) == content(recorded(tmp_path / "whole.zarr", 12))
    assert verify(second).clean


def test_the_digest_of_a_block_is_of_all_its_shards() -> None:
    shards = [("W", 0, 4, b"1" * 32), ("W", 1, 4, b"2" * 32), ("loss", 0, 4, b"3" * 32)]
    whole = block_digest(shards)
    assert block_digest(reversed(shards)) == whole
    for number in range(3):
        assert block_digest(shards[:number] + shards[number + 1 :]) != whole
        name, part, rows, digest = shards[number]
        for other in (
            ("X", part, rows, digest),
            (name, 7, rows, digest),
            (name, part, 3, digest),
            (name, part, rows, b"4" * 32),
        ):
            assert block_digest([*shards[:number], other, *shards[number + 1 :]]) != whole
