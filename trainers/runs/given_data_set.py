"""The data set of a Trainer's run, given again and compared with the recorded facts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

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
        if path.is_dir():
            data_set = _saved(path)
        else:
            data_set = _Arrays(path, recorded.get("columns", ("input_ids", "labels")), with_index)
    if "sha256" in recorded and (found := data_set_identity(data_set)) != {
        name: value for name, value in recorded.items() if name != "class"
    }:
        raise CorpusError(
            f"the data set has {_shown(found)}, but that of the run has {_shown(recorded)}; give "
            "the data set that the Trainer was trained with"
        )
    return data_set


class _Arrays(Dataset[dict[str, torch.Tensor]]):
    """Examples of a file of arrays. Labels equal the ids unless the file has others."""

    def __init__(self, path: Path, columns: Sequence[str], with_index: bool) -> None:
        with open_file(path) as file:
            keys = {name: name for name in TOKENS if name in file.keys}
            if len(file.keys) == 1:  # .npy has no names
                keys = dict.fromkeys(TOKENS[:1], file.keys[0])
            found = ", ".join(f"{key} {file.dtype(key)} {file.shape(key)}" for key in file.keys)
            shape = file.shape(keys["input_ids"]) if "input_ids" in keys else ()
            wrong = any("int" not in file.dtype(k) or file.shape(k) != shape for k in keys.values())
            if wrong or len(shape) != 2:
                raise FormatError(
                    f"{path}: found {found or 'no array'}, expected integers input_ids (example, "
                    "position), and labels of the same shape if they differ"
                )
            arrays = {name: np.asarray(file.read(key)) for name, key in keys.items()}
        ids = arrays["input_ids"]
        filled = {"labels": ids, "attention_mask": np.ones_like(ids)}
        self._arrays = {name: arrays.get(name, filled.get(name, ids)) for name in columns}
        self._with_index = with_index

    def __len__(self) -> int:
        return len(self._arrays["input_ids"])

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        example = {
            name: torch.from_numpy(values[number].astype(np.int64))
            for name, values in self._arrays.items()
        }
        return example | ({EXAMPLE_INDEX: torch.tensor(number)} if self._with_index else {})


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
