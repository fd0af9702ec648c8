"""Checkpoints of a recorded training: one safetensors file each, in a folder beside the run.

A file holds tensors, and one JSON text among its metadata with everything else. Reading one never
executes anything that it holds: the format has no code, and nothing here unpickles. The text names
every tensor with its type, shape and crc32c, and has a crc32c of its own, so that a damaged file is
refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trajstore.errors import FormatError, RunExists
from trajstore.store.metadata.object_keys import CHECKPOINT, checkpoint_folder
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, flush, put, sweep
from trajstore.store.storage.remote_path import Location, local_file

__all__ = ["Checkpoint", "CheckpointFolder"]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """State of a training after an optimizer step.

    Attributes
    ----------
    run : str
        When the run was created, which tells it from another one of the same name.
    step : int
        Optimizer steps taken.
    rows : int
        Rows of the run until then, without a last one that is only there because training ended.
    config : dict
        Configuration of the run.
    sources : dict of str to str
        Paths of the text and the tokenizer, where they were given.
    state : dict
        JSON values: what is no tensor.
    tensors : dict of str to tensor
        On the CPU.
    name : str
        Of the run's folder; empty where it was not noted.
    """

    run: str
    step: int
    rows: int
    config: dict[str, Any]
    sources: dict[str, str]
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    name: str = ""

    def save(self, path: Location, *, fsync: bool = True) -> int:
        """Write to a file, atomically.

        Returns
        -------
        int
            Bytes written.
        """
        text = json.dumps(
            {
                "format": _FORMAT,
                "run": self.run,
                "name": self.name,
                "step": self.step,
                "rows": self.rows,
                "config": self.config,
                "sources": self.sources,
                "state": self.state,
                "tensors": {name: _description(tensor) for name, tensor in self.tensors.items()},
            }
        )
        metadata = {"trajstore": text, "crc32c": str(google_crc32c.value(text.encode()))}
        return put(path, [save(self.tensors, metadata)], fsync=fsync)

    @classmethod
    def load(cls, path: Location) -> Self:
        """Read a file.

        Raises
        ------
        FormatError
            If it is no checkpoint, was cut short, or a bit of it has changed.
        """
        facts, tensors = _read(path)
        described = facts.pop("tensors")
        if described.keys() != tensors.keys():
            raise _wrong(path, "it does not hold the tensors that it names")
        for name, tensor in tensors.items():
            if _description(tensor) != described[name]:
                raise _wrong(path, f"{name} is not what was written")
        if facts.pop("format") != _FORMAT:
            raise FormatError(f"{path} was written by a newer trajstore; install that one")
        return cls(**facts, tensors=tensors)


class CheckpointFolder:
    """The checkpoints of one run.

    ``NAME.zarr`` and ``NAME`` beside it share a folder; those of the other run are left alone.

    Parameters
    ----------
    run : Path or RemotePath
        Of the run; the folder is its sibling ``NAME.ckpt``.
    fsync : bool
        Have each file on the disk before going on.
    """

    def __init__(self, run: Location, *, fsync: bool = True) -> None:
        self.path = checkpoint_folder(run)
        self._run = run
        self._fsync = fsync
        self._rows: dict[int, int] = {}
        self._staged: tuple[Path, Path] | None = None
        self._placed: Path | None = None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, in increasing order."""
        entries: Iterable[Location] = self.path.iterdir() if self.path.is_dir() else []
        names = (entry.name for entry in entries)
        return sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)))

    def check(self) -> None:
        """Insist that a new run does not share the folder with another one.

        Raises
        ------
        RunExists
            If another run beside it has checkpoints in the folder.
        """
        for step in self.steps():
            if (other := self._other_owner(step)) is not None:
                raise self._taken_by(other)

    def newest(
        self, run: str, committed_rows: int, *, until: int | None = None
    ) -> Checkpoint | None:
        """Newest checkpoint of that run that is not past its committed rows, nor past a step.

        Raises
        ------
        FormatError
            If one that may be it is damaged.
        """
        for step in reversed(self.steps()):
            if until is not None and step > until:
                continue
            try:
                checkpoint = Checkpoint.load(self._file(step))
            except FileNotFoundError:
                continue  # a recording has removed it, because it has a newer one
            if self._is_others(checkpoint.name):
                continue
            if checkpoint.run == run and checkpoint.rows <= committed_rows:
                return checkpoint
        return None

    def waits(self, committed_rows: int) -> bool:
        """Whether one is there that is of no use yet, because its rows are not all committed."""
        return any(rows > committed_rows for rows in self._rows.values())

    def begin(self, taken: Checkpoint | None) -> None:
        """Remove what is of no use to a run that goes on from a checkpoint, or from the start.

        That is leftovers of interrupted writes, and all its other checkpoints.
        """
        if self.path.is_dir():
            sweep(self.path)
        self._rows = {} if taken is None else {taken.step: taken.rows}
        for step in self.steps():
            if step not in self._rows and self._other_owner(step) is None:
                self._file(step).unlink()

    def add(self, checkpoint: Checkpoint, committed_rows: int) -> None:
        """Write one, and remove those that nobody will resume from.

        Those past the committed rows are kept, and of the others the newest.

        Parameters
        ----------
        checkpoint : Checkpoint
        committed_rows : int
            Of the run.

        Raises
        ------
        OSError
            If it could not be written; the others stay.
        RunExists
            If another run beside this one has one of that step there.
        """
        checkpoint.save(self._free(checkpoint.step), fsync=self._fsync)
        self._rows[checkpoint.step] = checkpoint.rows
        self.prune(committed_rows)

    def stage(self, checkpoint: Checkpoint) -> None:
        """Write one beside its place, to be put there by `place`; until then all others stay.

        Raises
        ------
        OSError
            If it could not be written.
        RunExists
            If another run beside this one has one of that step there.
        """
        file = self._free(checkpoint.step)
        assert isinstance(file, Path)  # as the run, which is in no object store
        beside = file.with_name(f".{file.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        self._staged = (beside, file)
        checkpoint.save(beside, fsync=self._fsync)

    def place(self) -> None:
        """Put what was staged into its place."""
        assert self._staged is not None
        beside, file = self._staged
        beside.replace(file)
        self._staged, self._placed = None, file
        if self._fsync:
            flush([file.parent])

    def discard(self) -> None:
        """Remove what was staged, or placed before its run, because that has come to nothing."""
        if self._staged is not None:
            self._staged[0].unlink(missing_ok=True)
            self._staged = None
        if self._placed is not None and not self._run.exists():
            self._placed.unlink(missing_ok=True)
            self._placed = None
        if isinstance(self.path, Path) and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def prune(self, committed_rows: int) -> None:
        """Remove those that nobody will resume from: of the usable ones, all but the newest.

        Parameters
        ----------
        committed_rows : int
            Of the run.
        """
        usable = [step for step, rows in self._rows.items() if rows <= committed_rows]
        for step in sorted(usable)[:-1]:
            self._file(step).unlink(missing_ok=True)
            del self._rows[step]

    def _free(self, step: int) -> Location:
        """Path of the checkpoint of a step, which may be written, in its folder."""
        if isinstance(self.path, Path) and not self.path.is_dir():
            self.path.mkdir()
            if self._fsync:
                flush([self.path.parent])
        if (other := self._other_owner(step)) is not None:
            raise self._taken_by(other)
        return self._file(step)

    def _file(self, step: int) -> Location:
        return self.path / f"step-{step:08d}.safetensors"

    def _other_owner(self, step: int) -> str | None:
        """Name of the other run that a checkpoint belongs to; None if there is no such one."""
        path = self._file(step)
        if not path.exists():
            return None
        try:
            name = _described(path).get("name", "")
        except FormatError:
            return None  # nobody can go on from it
        return name if self._is_others(name) else None

    def _is_others(self, name: str) -> bool:
        """Whether that is another run's, which is there; a run may have been renamed."""
        if name in ("", self._run.name):
            return False
        other = self._run.with_name(name)
        return other.exists() and checkpoint_folder(other) == self.path

    def _taken_by(self, other: str) -> RunExists:
        return RunExists(
            f"{self.path} holds checkpoints of {other}, and those of {self._run.name} would lie "
            "there too; choose another path for the run"
        )


def _description(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "crc32c": google_crc32c.value(data.tobytes()),
    }


def _read(path: Location) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    facts = _described(path)
    try:
        with local_file(path) as local, safe_open(local, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise _wrong(path, f"it cannot be read ({error})") from error
    return facts, tensors


def _described(path: Location) -> dict[str, Any]:
    """What a file says of itself, without its tensors."""
    try:
        with local_file(path) as local, safe_open(local, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise _wrong(path, f"it cannot be read ({error})") from error
    text = metadata.get("trajstore", "")
    if metadata.get("crc32c") != str(google_crc32c.value(text.encode())):
        raise _wrong(path, "its description is not what was written")
    facts: dict[str, Any] = json.loads(text)
    return facts


def _wrong(path: Location, fault: str) -> FormatError:
    return FormatError(
        f"{path} is not a sound checkpoint: {fault}; remove it to go on from an older one, or, if "
        "there is none, by training the recorded steps again"
    )
