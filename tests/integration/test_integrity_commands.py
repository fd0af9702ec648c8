"""`trajstore verify` and `trajstore repair`, as they are installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import Cli
from damage import contents, flip, shard_index, wide_run

from trajstore import RunWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return wide_run(tmp_path / "run.zarr")


def test_the_common_name_of_two_matrices(trajstore_cli: Cli, tmp_path: Path) -> None:
    paths = [tmp_path / f"pair.{name}.zarr" for name in ("E", "W")]
    for path in paths:
        attributes = {"recording": {"parameter": path.suffixes[0][1:]}}
        with RunWriter.create(
            path, token=range(3), hidden=2, variables={"W": "float32"}, attributes=attributes
        ) as writer:
            writer.append(0, W=np.zeros((3, 2), np.float32))
    pair = tmp_path / "pair.zarr"
    done = trajstore_cli("verify", pair)
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [p.name for p in paths]
    facts = json.loads(trajstore_cli("verify", pair, "--json").stdout)
    assert {name: one["clean"] for name, one in facts.items()} == {str(p): True for p in paths}
    (paths[0] / "W" / "zarr.json").unlink()
    assert "pair.E.zarr: 1 problem" in trajstore_cli("verify", pair, rc=1).stdout
    (paths[0] / "zarr.json").unlink()
    assert f"similar names: {paths[0]}, {paths[1]}" in trajstore_cli("verify", pair, rc=2).stderr


def test_damage_is_shown_and_repaired(trajstore_cli: Cli, run: Path) -> None:
    before = contents(run)
    done = trajstore_cli("verify", run)
    assert done.stdout.startswith("run.zarr: sound; checked 11 rows in 15 shards, 37 chunks, ")
    assert done.stdout.count("\n") == 1
    assert trajstore_cli("repair", run).stdout == "run.zarr is sound; nothing to repair.\n"
    assert contents(run) == before

    path, index = shard_index(run, "W", 2)
    offset, length = index[1]
    flip(path, 8 * offset + 500)
    (run / "grad" / "zarr.json").unlink()

    done = trajstore_cli("verify", run, rc=1)
    row = next(line for line in done.stdout.splitlines() if line.strip().startswith("W "))
    assert row.split()[:4] == ["W", "2", f"{offset}–{offset + length}", "run.zarr/W/c.2.0.0"]
    assert "run.zarr: 2 problems" in done.stdout
    assert f"would do: trajstore repair {run} --dry-run\n" in done.stdout
    assert f"trajstore export {run} --format run --fill-damaged -o COPY.zarr\n" in done.stdout
    facts = json.loads(trajstore_cli("verify", run, "--json", rc=1).stdout)
    assert [problem["array"] for problem in facts["problems"]] == ["grad", "W"]
    assert facts["problems"][1]["first_byte"] == offset

    done = trajstore_cli("verify", run, "--replay", rc=1)
    assert "Replay skipped: the run is damaged" in done.stdout
    facts = json.loads(trajstore_cli("verify", run, "--replay", "--json", rc=1).stdout)
    assert facts["replay"] is None

    before = contents(run)
    done = trajstore_cli("repair", run, "--dry-run")
    assert done.stdout.startswith(
        "Damaged: W, steps 8 to 10. Whole: step, grad, exp_avg, loss.\n"
        "Repair:\n  3 of 11 rows are dropped, from row 8 on"
    )
    assert "grad/zarr.json is rewritten" in done.stdout
    copy = f"  trajstore export {run} --format run"
    assert f"{copy} --fill-damaged -o COPY.zarr\n" in done.stdout
    assert f"{copy} --variables" not in done.stdout  # a run needs W
    assert f"cp -r {run} {run}.copy\n" in done.stdout
    assert done.stdout.endswith(f"To repair, run: trajstore repair {run}\n")
    copied = trajstore_cli(
        "export", run, "--format", "run", "--fill-damaged", "-o", run.with_name("copy.zarr")
    )
    assert "W holds NaN in place of damaged values" in copied.stdout
    assert "(steps 8 to 10)" in copied.stdout
    assert contents(run) == before
    planned, _, rest = done.stdout.partition("To keep more")
    assert rest
    assert trajstore_cli("repair", run).stdout == f"{planned}run.zarr is repaired.\n"
    trajstore_cli("verify", run)
    assert "interrupted, 8 rows" in trajstore_cli("info", run).stdout


def test_what_cannot_be_repaired_is_reported(trajstore_cli: Cli, run: Path) -> None:
    flip(run / "token_text" / "c.0", 99)
    done = trajstore_cli("repair", run, rc=1)
    assert "Cannot be repaired" in done.stdout
    assert "token_text, block 0" in done.stdout
    assert "Repair:" not in done.stdout


@pytest.mark.torch
def test_a_replay_names_one_altered_bit_whose_checksum_fits(
    trajstore_cli: Cli, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from trainings import tiny_run

    run = tiny_run(tmp_path / "run.zarr", count=6)
    done = trajstore_cli("verify", run, "--replay")
    assert "run.zarr: sound" in done.stdout
    assert "Replayed 6 of 6 steps" in done.stdout
    assert "0 values differ" in done.stdout

    ds = xr.open_zarr(run).load()
    row = {str(name): variable.values[6] for name, variable in ds.data_vars.items()}
    row["W"].view("u4")[11, 7] ^= 1 << 16
    with RunWriter.resume(run, rows=6) as writer:
        writer.append(6, **row)
    facts = json.loads(trajstore_cli("verify", run, "--replay", "--json", rc=1).stdout)
    assert facts["clean"] is True
    assert facts["replay"]["variables"]["W"]["differing"] == 1
    first = facts["replay"]["variables"]["W"]["first"]
    assert (first["step"], first["token"]) == (6, 11)
    assert "1 values differ" in trajstore_cli("verify", run, "--replay", rc=1).stdout
