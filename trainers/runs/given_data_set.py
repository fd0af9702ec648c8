"""The data set of a Trainer's run, given again and compared with the recorded facts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset

from trajstore.errors import CorpusError, FormatError, MissingExtra, RunNotFound
from trajstore.formats.open_file import open_file
from trajstore.trainers.recording.data_set_tokens import TOKENS
from trajstore.trainers.recording.step_examples import EXAMPLE_INDEX
from trajstore.trainers.recording.trainer_facts import data_set_identity

__all__ = ["given_data_set"]


def given_data_set(given: Any, recorded: Mapping[str, Any], *, with_index: bool) -> Any:
    """Return a data set that a Trainer takes.

    Parameters
    ----------
    given : path-like or object
        A folder written by ``Dataset.save_to_disk``; a file with ``input_ids`` and, optionally,
        ``labels`` and ``attention_mask``, each (example, position); or the data set itself.
    recorded : mapping
        Facts about the recorded one.
    with_index : bool
        Add the index to each example of a file.

    Raises
    ------
    RunNotFound, FormatError
        If the path does not exist, or holds no data set.
    MissingExtra
        If it is a folder and the package datasets is not installed.
    CorpusError
        If the data set differs from the recorded one.
    """
    data_set = given
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        columns = recorded.get("columns", ("input_ids", "labels"))
        data_set = _saved(path) if path.is_dir() else _of_file(path, columns, with_index)
    if "sha256" not in recorded:
        return data_set
    try:
        found = data_set_identity(data_set)
    except (TypeError, KeyError, IndexError) as error:
        raise FormatError(
            f"dataset: got {type(given).__name__}, which is no sequence of examples ({error!r}); "
            "give the data set that the Trainer was trained with, such as one split"
        ) from error
    if found != {name: value for name, value in recorded.items() if name != "class"}:
        raise CorpusError(
            f"the data set has {_shown(found)}, but that of the run has {_shown(recorded)}; give "
            "the data set that the Trainer was trained with"
        )
    return data_set


def _of_file(path: Path, columns: Sequence[str], with_index: bool) -> StackDataset[Any]:
    """Return the examples of a file of arrays. Labels equal the ids unless the file has others."""
    with open_file(path) as file:
        keys = {name: name for name in TOKENS if name in file.keys}
        if len(file.keys) == 1:  # .npy has no names
            keys = {"input_ids": file.keys[0]}
        shape = file.shape(keys["input_ids"]) if "input_ids" in keys else ()
        wrong = [key for key in keys.values() if "int" not in file.dtype(key)]
        wrong += [key for key in keys.values() if file.shape(key) != shape]
        if wrong or len(shape) != 2:
            found = ", ".join(f"{key} {file.dtype(key)} {file.shape(key)}" for key in file.keys)
            raise FormatError(
                f"{path}: found {found or 'no array'}, expected integers input_ids (example, "
                "position), and labels of the same shape if they differ"
            )
        arrays = {name: torch.from_numpy(file.read(key).astype(np.int64))
                  for name, key in keys.items()}  # fmt: skip
    filled = {"labels": arrays["input_ids"], "attention_mask": torch.ones(shape, dtype=torch.int64)}
    filled |= arrays
    chosen: dict[str, Any] = {name: filled[name] for name in columns}
    if with_index:
        chosen[EXAMPLE_INDEX] = torch.arange(shape[0])
    return StackDataset(**chosen)


def _saved(path: Path) -> Any:
    """Return a table that ``Dataset.save_to_disk`` has written."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"{path} is a folder, which needs the package datasets; run: pip install datasets, or "
            "give a .safetensors, .npz or .npy of input_ids"
        ) from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise RunNotFound(f"{path} holds no data set of Dataset.save_to_disk") from error
    if not isinstance(loaded, datasets.Dataset):
        first = next(iter(loaded), "train")
        raise FormatError(f"{path} holds several splits; give the folder of one: {path / first}")
    return loaded


def _shown(facts: Mapping[str, Any]) -> str:
    return (
        f"{facts['examples']:,} examples with {', '.join(facts['columns'])} (sha256 "
        f"{facts['sha256'][:12]}…)"
    )
