"""A run that is written, closed, cut, resumed, crashed and damaged in any order, against a list.

The model is the list of steps that a reader must see, and how many more it may see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import zarr
from crashing import BLOCK, TYPES, check_rows, create, extend
from disk import moves
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from still_timer import commit_now

from trajstore import RunWriter, repair, verify
from trajstore.store.metadata.block_plan import BLOCKS
from trajstore.store.storage.remote_path import METADATA_KEY


class _Death(BaseException):
    """The process ends here, as far as the files are concerned."""


class History(RuleBasedStateMachine):
    """One run; its steps are 0, 1, 2, …"""

    writer: Any = None

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "run.zarr"
        self.least = self.most = 0  # rows that a reader must see, and may see
        self.writer = create(self.path)

    def teardown(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @precondition(lambda self: self.writer is not None)
    @rule(rows=st.integers(1, 2 * BLOCK + 1))
    def append(self, rows: int) -> None:
        extend(self.writer, self.writer.rows + rows)
        self.most = self.writer.rows
        full = self.most - self.most % BLOCK
        self.least = max(self.least, full - BLOCKS * BLOCK)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def commit_by_time(self) -> None:
        commit_now(self.writer)
        self.least = self.most

    @precondition(lambda self: self.writer is not None)
    @rule(status=st.sampled_from(["complete", "interrupted"]))
    def close(self, status: Any) -> None:
        self.writer.close(status)
        self.least = self.most = self.writer.rows
        self.writer = None
        self.written = self.most

    @precondition(lambda self: self.writer is None)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        rows = data.draw(st.none() | st.integers(0, self.least))
        self.writer = RunWriter.resume(self.path, rows=rows, commit_every=None)
        self.least = self.most = self.writer.rows
        assert rows is None or rows == self.least

    @precondition(lambda self: self.writer is not None)
    @rule(moved=st.integers(0, 30), rows=st.integers(1, 3 * BLOCK), by_time=st.booleans())
    def crash(self, moved: int, rows: int, by_time: bool) -> None:
        """Die at some move of an object into its place, or after the last row."""
        move, left = os.replace, iter(range(moved))

        def replace(source: Any, target: Any) -> None:
            if next(left, None) is None:
                shutil.copy(source, f"{source}x.partial")  # what a killed process would leave
                raise _Death
            move(source, target)

        with moves(replace):
            with contextlib.suppress(_Death):
                for _ in range(rows):
                    extend(self.writer, self.writer.rows + 1)
                    if by_time:  # each when the one before is done, or chance decides what is moved
                        self._settle()
                        self.writer._blocks._commit_unfinished()
                        self._settle()
            self.most = max(self.most, self.writer.rows)
            for _ in range(2):  # it may die only here
                with contextlib.suppress(_Death):
                    self.writer.close("interrupted")
        self.writer = None
        seen = xr.open_zarr(self.path).sizes["step"]
        assert self.least <= seen <= self.most
        self.written = self.most
        self.least = self.most = seen

    def _settle(self) -> None:
        if self.writer._blocks._last is not None:
            wait([self.writer._blocks._last])

    @precondition(lambda self: self.writer is None and self.least > 0)
    @rule(data=st.data())
    def tear(self, data: st.DataObject) -> None:
        """Lose the end of a shard, and repair."""
        files = (
            file for name in ("step", *TYPES) for file in sorted((self.path / name).glob("c.*"))
        )
        shards = [file for file in files if int(file.name.split(".")[1]) * BLOCK < self.least]
        shard = data.draw(st.sampled_from(shards))
        size = shard.stat().st_size
        os.truncate(shard, data.draw(st.integers(0, size - 1)))
        assert not verify(self.path).clean
        repair(self.path)
        self.least = self.most = self.written = int(shard.name.split(".")[1]) * BLOCK

    @precondition(lambda self: self.writer is None)
    @rule()
    def change_root(self) -> None:
        """Set an attribute as zarr does it, which loses the consolidated metadata; and repair."""
        zarr.open_group(self.path, mode="a", use_consolidated=False).attrs["note"] = "mine"
        assert not verify(self.path).clean
        repair(self.path)
        self.written = self.most  # what a dead writer left has been removed

    @precondition(lambda self: self.writer is None)
    @rule(cut=st.floats(0, 1, exclude_max=True))
    def truncate_root(self, cut: float) -> None:
        """Lose the root. Without it, rows that a dead writer wrote and did not commit may count."""
        root = self.path / METADATA_KEY
        os.truncate(root, int(cut * root.stat().st_size))
        assert not verify(self.path).clean
        repair(self.path)
        seen = xr.open_zarr(self.path).sizes["step"]
        assert self.least <= seen <= self.written
        self.least = self.most = self.written = seen

    @precondition(lambda self: self.writer is None)
    @rule()
    def repair_what_is_whole(self) -> None:
        before = {file: file.read_bytes() for file in self.path.rglob("c.*")}
        repair(self.path)
        assert verify(self.path).clean
        self.written = self.most
        for file in self.path.rglob("c.*"):
            assert file.read_bytes() == before[file]

    @invariant()
    def a_reader_sees_whole_rows(self) -> None:
        if not hasattr(self, "path"):
            return
        ds = xr.open_zarr(self.path)
        rows = ds.sizes["step"]
        assert rows == ds.attrs["committed_rows"]
        assert self.least <= rows <= self.most
        assert ds.step.values.tolist() == list(range(rows))
        check_rows(ds)


TestHistory = pytest.mark.nightly(History.TestCase)
TestHistory.settings = settings(
    # Without shrinking, which takes many times as long as finding: these steps read well as found.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
)
