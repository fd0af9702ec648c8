"""The checkpoints next to a run: their files and their folder.

A file is in the format safetensors: tensors, and one JSON text in its metadata with everything
else. Reading a file never executes its contents: the format has no code, and nothing is unpickled.
The text has the type, shape and crc32c of every tensor, and a crc32c of its own. So a damaged file
raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trajstore.errors import FormatError, RunExists
from trajstore.installation import __version__
from trajstore.store.storage.atomic import flush, put, sweep
from trajstore.store.storage.remote_path import (
    CHECKPOINT,
    METADATA_KEY,
    Location,
    checkpoint_folder,
    local_file,
)
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.states.state import State

_FORMAT = 4
_READ = (3, _FORMAT)  # format 3 has the places of parameters in the optimizer, not their names

_MODEL, _OPTIMIZER = "model.", "optimizer."


def save_state(state: State, path: Location, *, fsync: bool = True) -> int:
    """Write a state to a file atomically; return the number of bytes."""
    tensors = {_MODEL + name: tensor for name, tensor in state.weights.items()}
    for name, values in state.kept.items():
        tensors |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in values.items()}
    fields = {k: v for k, v in vars(state).items() if k not in ("weights", "kept")}
    described = {name: _description(tensor) for name, tensor in tensors.items()}
    text = json.dumps(fields | {"format": _FORMAT, "tensors": described})
    metadata = {"trajstore": text, "crc32c": str(google_crc32c.value(text.encode()))}
    return put(path, [save(tensors, metadata)], fsync=fsync)


def load_state(path: Location) -> State:
    """Read a state from a file.

    Raises
    ------
    FormatError
        If the file is not a checkpoint, is truncated, or is damaged.
    """
    try:
        with local_file(path) as local, safe_open(local, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    text = metadata.get("trajstore", "")
    if metadata.get("crc32c") != str(google_crc32c.value(text.encode())):
        raise _damaged(path, "the checksum of its description is wrong")
    fields = json.loads(text)
    described = fields.pop("tensors")
    if described.keys() != tensors.keys():
        raise _damaged(path, "its tensors differ from its list of tensors")
    for name, tensor in tensors.items():
        if _description(tensor) != described[name]:
            raise _damaged(path, f"the checksum of {name} is wrong")
    number = fields.pop("format")
    if number not in _READ:
        raise FormatError(
            f"{path} has checkpoint format {number}, and trajstore {__version__} reads the formats "
            f"{_READ[0]} to {_FORMAT}; resume the run with the version that recorded it"
        )
    if number == 3:
        before = fields.pop("state")
        taken = before["schedule"]["last_epoch"]
        fields["counters"] = {"taken": taken, "scaler": before["scaler"]}
        fields.pop("name", None)
    weights: dict[str, torch.Tensor] = {}
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(_MODEL):
            weights[name.removeprefix(_MODEL)] = tensor
        else:
            parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
            kept.setdefault(parameter, {})[key] = tensor
    return State(**fields, weights=weights, kept=kept)


def _description(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return {
        "dtype": type_name(tensor.dtype),
        "shape": list(tensor.shape),
        "crc32c": google_crc32c.value(data.tobytes()),
    }


def _damaged(path: Location, fault: str) -> FormatError:
    return FormatError(
        f"the checkpoint {path} is damaged: {fault}; remove it, and resume from an older one or, "
        "without one, by repeating the recorded steps"
    )


class CheckpointFolder:
    """The checkpoints of one run.

    Parameters
    ----------
    run : Path or RemotePath
        The run; the folder is its sibling ``NAME.ckpt``.
    fsync : bool
        Flush each file to the disk.
    """

    def __init__(self, run: Location, *, fsync: bool = True) -> None:
        self.path = checkpoint_folder(run)
        self._run = run
        self._fsync = fsync
        self._rows: dict[int, int] = {}

    def check(self) -> None:
        """Check that no other run has the same folder.

        Raises
        ------
        RunExists
            If ``NAME.zarr`` is trained, and ``NAME`` is a run, or the other way round.
        """
        stem = self._run.name.removesuffix(".zarr")
        other = self._run.with_name(stem if self._run.name != stem else f"{stem}.zarr")
        if (other / METADATA_KEY).exists():
            raise RunExists(
                f"{other} exists, and {self._run.name} would have its checkpoints in the same "
                f"folder, {self.path.name}; choose another path, or rename one of them"
            )

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in increasing order."""
        entries: Iterable[Location] = self.path.iterdir() if self.path.is_dir() else []
        names = (entry.name for entry in entries)
        return sorted(int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)))

    def read(self, step: int, run: str, committed_rows: int) -> State | None:
        """Return the checkpoint of a step, if it is of this run and within its committed rows.

        Raises
        ------
        FormatError
            If it is damaged.
        """
        try:
            state = load_state(self.file(step))
        except FileNotFoundError:
            return None  # a recording has replaced it by a newer one
        return state if state.run == run and state.rows <= committed_rows else None

    def has_uncommitted(self, committed_rows: int) -> bool:
        """Return True if a checkpoint cannot be used yet, because rows of it are not committed."""
        return any(rows > committed_rows for rows in self._rows.values())

    def keep(self, state: State) -> None:
        """Have the checkpoint that a run resumes from survive a loss of power.

        It may have been written without flushes, and the first commit promises its rows again. If
        another process has just removed it, that process holds the lock, and the resume fails.
        """
        file = self.file(state.step)
        if self._fsync and isinstance(file, Path):
            flush(path for path in (file, file.parent, file.parent.parent) if path.exists())

    def clean(self, state: State | None) -> None:
        """Remove files that a run does not need when it starts, or resumes from a checkpoint.

        These are partial files of interrupted writes, and all its other checkpoints.
        """
        if self.path.is_dir():
            sweep(self.path)
        self._rows = {} if state is None else {state.step: state.rows}
        for step in self.steps():
            if step not in self._rows:
                self.file(step).unlink()

    def add(self, checkpoint: State, committed_rows: int) -> None:
        """Write a checkpoint, and remove those that are no longer needed.

        Checkpoints past the committed rows are kept, and the newest of the others.

        Parameters
        ----------
        checkpoint : State
        committed_rows : int
            Committed rows of the run.

        Raises
        ------
        OSError
            If the checkpoint could not be written; the others are kept.
        """
        if isinstance(self.path, Path) and not self.path.is_dir():
            self.path.mkdir()
            if self._fsync:
                flush([self.path.parent])
        save_state(checkpoint, self.file(checkpoint.step), fsync=self._fsync)
        self._rows[checkpoint.step] = checkpoint.rows
        self.prune(committed_rows)

    def remove(self, step: int | None = None) -> None:
        """Remove the checkpoint of a step, and the folder if it is empty."""
        if step is not None:
            self.file(step).unlink(missing_ok=True)
        if isinstance(self.path, Path) and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def prune(self, committed_rows: int) -> None:
        """Remove checkpoints that are not needed: all usable ones except the newest.

        Parameters
        ----------
        committed_rows : int
            Committed rows of the run.
        """
        usable = [step for step, rows in self._rows.items() if rows <= committed_rows]
        for step in sorted(usable)[:-1]:
            self.file(step).unlink(missing_ok=True)
            del self._rows[step]

    def file(self, step: int) -> Location:
        """Path of the checkpoint of a step."""
        return self.path / f"step-{step:08d}.safetensors"
