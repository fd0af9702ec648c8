"""Runs in object stores and on web servers are checked and mended as those in folders."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits_and_calls import nightly_but
from damage import COPIES, VALUES, all_of, contents, copied, flip, write
from object_stores import copied as copied_to
from object_stores import web_server

from trajstore import RunWriter, repair, verify
from trajstore.errors import InvalidArgument, ObjectStoreError, RunLocked, RunNotFound
from trajstore.integrity import array_checks
from trajstore.integrity.repair import Repair
from trajstore.store.storage.remote_path import RemotePath


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str:
    return f"memory://verified/{request.node.name}/run.zarr"


def told(found: Any, where: object) -> dict[str, Any]:
    """All that is found, with places as they are seen from the run."""
    facts = dict(found.facts())
    facts["path"] = ""
    for problem in facts.get("problems", ()):
        problem["path"] = problem["path"].removeprefix(f"{where}/")
        problem["message"] = problem["message"].replace(str(where), "")
    return facts


def held_by(place: RemotePath) -> dict[str, bytes]:
    keys = {path.key.removeprefix(f"{place.key}/"): path for path in place.below()}
    return {key: path.read_bytes() for key, path in sorted(keys.items())}


LEFTOVERS = all_of(
    copied("W/c.0.0.0", "W/c.9.0.0"),
    lambda run: [write(run / key, b"mine") for key in ("notes.txt", "W/notes.txt")],
)
FAR = ("chunk: W", "root: cut", "object: missing", "object: empty", "coordinate: a bit",
       "own: token is missing")  # fmt: skip
ACTS = {"nothing": lambda run: None, "leftovers": LEFTOVERS} | {
    damage.name: damage.act for damage in (*VALUES, *COPIES) if damage.name in FAR
}


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is read in many pieces."""
    monkeypatch.setattr(array_checks, "_WINDOW", 500)


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("damage", nightly_but(ACTS, "nothing", "chunk: W", "root: cut"))
def test_damage_at_an_address_is_found_and_repaired_as_in_a_folder(
    run: Path, address: str, damage: str
) -> None:
    ACTS[damage](run)
    far = copied_to(run, address)
    found = verify(run)
    assert found.clean is (damage in ("nothing", "leftovers"))
    assert told(verify(address), far) == told(found, run)
    assert told(repair(address, dry_run=True), far) == told(repair(run, dry_run=True), run)
    done = repair(run)
    assert told(repair(far), far) == told(done, run)
    assert held_by(far).keys() == contents(run).keys()
    assert verify(far).clean is verify(run).clean
    assert not repair(far, dry_run=True).actions
    assert {path.name for path in far.parent.iterdir()} == {"run.zarr"}  # no lock


def test_a_checkpoint_is_checked_there(address: str, run: Path) -> None:
    far = copied_to(run, address)
    checkpoint = far.with_name("run.ckpt") / "step-00000003.safetensors"
    checkpoint.write_bytes(b"no checkpoint")
    (problem,) = verify(address).problems
    assert problem.path == checkpoint
    assert problem.message.startswith(f"the checkpoint is broken: {checkpoint} is not a valid")
    assert repair(address).actions
    assert not checkpoint.exists()


@pytest.mark.usefixtures("small_requests")
def test_a_shard_that_is_replaced_meanwhile_is_read_again(
    address: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last block of a recording is, with each commit."""
    far = copied_to(run, address)
    real, replaced = RemotePath.read_range, []

    def read_range(self: RemotePath, start: int, stop: int, tag: str | None) -> bytes:
        if self.name == "c.2.0.0" and self not in replaced:
            replaced.append(self)
            self.write_bytes(self.read_bytes())
        return real(self, start, stop, tag)

    monkeypatch.setattr(RemotePath, "read_range", read_range)
    assert told(verify(address), far) == told(verify(run), run)
    assert replaced


def test_a_run_that_is_not_there_and_one_that_is_recorded(address: str) -> None:
    for function in (verify, repair):
        with pytest.raises(RunNotFound, match=f"there is no run at {address}"):
            function(address)
    with RunWriter.create(
        address, token=[0, 1], hidden=2, variables={"W": "float32"}, block_rows=2
    ) as writer:
        writer.append(step=0, W=np.eye(2, dtype="f4"))
        assert verify(address).clean
        for dry_run in (True, False):
            with pytest.raises(RunLocked, match=r"writing to|written to"):
                repair(address, dry_run=dry_run)


def test_the_lock_of_a_dead_writer_is_a_note(address: str, run: Path) -> None:
    far = copied_to(run, address)
    lock = far.with_name(".run.zarr.lock")
    lock.write_bytes(b"{}")
    assert verify(address).notes == ()
    lock.write_bytes(json.dumps({"host": socket.gethostname(), "process": 2**40}).encode())
    assert ".run.zarr.lock (" in (notes := str(verify(address).notes))
    assert ") is the lock of a dead writer" in notes


def test_a_repair_whose_lock_was_taken_writes_nothing(address: str, run: Path) -> None:
    flip(run / "W/c.1.0.0", 300)
    far = copied_to(run, address)
    before = held_by(far)

    def taken(plan: Repair) -> None:
        far.with_name(".run.zarr.lock").write_bytes(b"{}")

    with pytest.raises(RunLocked, match="took over its lock"):
        repair(address, on_plan=taken)
    assert held_by(far) == before


def test_a_run_on_a_web_server(run: Path) -> None:
    with web_server(run.parent) as (server, seen):
        url = f"{server}/run.zarr"
        found = verify(url)
        here = verify(run)
        assert found.clean
        assert "leftovers and checkpoints were not checked" in found.notes[0]
        assert (found.rows, found.shards, found.bytes) == (here.rows, here.shards, here.bytes)
        gets = [line for line in seen if line.startswith("GET")]
        assert len(gets) < 2 * len(contents(run)), gets
        flip(run / "W/c.1.0.0", 300)
        (problem,) = verify(url).problems
        assert (problem.array, problem.block) == ("W", 1)
        with pytest.raises(InvalidArgument, match="a web server is read-only; copy the run"):
            repair(url, dry_run=True)
        with pytest.raises(RunNotFound, match="there is no run at"):
            verify(f"{server}/none.zarr")


@pytest.mark.parametrize(
    ("name", "method"),
    [("W/c.1.0.0", "end_and_facts"), ("token/c.0", "read_bytes"), ("step/zarr.json", "read_bytes")],
)
def test_an_outage_is_no_damage(
    address: str, run: Path, name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_to(run, address)
    real = getattr(RemotePath, method)

    def out(self: RemotePath, *arguments: Any) -> Any:
        if self.key.endswith(name):
            raise ObjectStoreError(f"{self}: the server does not answer")
        return real(self, *arguments)

    monkeypatch.setattr(RemotePath, method, out)
    with pytest.raises(ObjectStoreError, match="does not answer"):
        verify(address)
