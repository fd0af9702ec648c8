"""A recorded step as a folder that transformers loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, RunExists
from trajstore.store.reading.run_info import attribute
from trajstore.store.storage.remote_path import RunPath, local_path
from trajstore.store.writing.create import staged_run
from trajstore.trainers.step_models.optimizer_state import optimizer_state_at
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.run_tokenizer import find_tokenizer
from trajstore.trainers.step_models.step_model import model_at

OPTIMIZER = "optimizer.pt"
"""File name of the optimizer's state."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A folder with the model of a step.

    Attributes
    ----------
    path : Path
    step : int
    tokenizer : str or None
        Name of its tokenizer.
    notes : tuple of str
        Limits of the folder, such as a missing tokenizer.
    """

    path: Path
    step: int
    tokenizer: str | None
    notes: tuple[str, ...]


@checks_types
def checkout(
    run: RunPath,
    output: str | os.PathLike[str],
    *,
    step: int,
    optimizer: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Checkout:
    """Write the model of a step to a folder that ``from_pretrained`` loads.

    The folder has the weights (safetensors), the configuration, and the tokenizer if the run has
    one. ``AutoModelForCausalLM.from_pretrained(output)`` returns a model with the recorded bits.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``.
    output : path-like
        The new folder.
    step : int
        A recorded step; 0 is the initial state.
    optimizer : bool
        Also write ``optimizer.pt``: the state dict of the optimizer for `torch.load`, or a list of
        them.
    tokenizer : path-like or str, optional
        Tokenizer instead of the run's: ``ascii``, a folder, or a ``tokenizer.json``.
    overwrite : bool
        Replace an existing checkout.

    Returns
    -------
    Checkout

    Raises
    ------
    RunExists
        If `output` exists, and `overwrite` is not set or it has no ``config.json``.
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters, or with `optimizer` the whole state of the
        optimizer.
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        If the model is not one of transformers, or this version of transformers has other
        parameters.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(
    ...     ["training.steps=3", "training.batch_size=4", 'recording.variables=["everything"]']
    ... )
    >>> found = checkout(record(config, "run.zarr"), "step-3", step=3)
    >>> found.tokenizer, AutoModelForCausalLM.from_pretrained(found.path).dtype
    ('ascii', torch.bfloat16)
    """
    check_new_folder(output, overwrite=overwrite)
    stored = RunParameters(run)
    if "model_config" not in stored.attributes:
        raise InvalidArgument(
            f"{run} does not record the configuration of a model of transformers, which a checkout "
            "needs; use trajstore.trainers.model_at with a constructor"
        )
    model: Any = model_at(run, step)
    found = find_tokenizer(stored.attributes, tokenizer)
    state = optimizer_state_at(run, step) if optimizer else None
    with staged_run(output, overwrite=overwrite, check=check_new_folder) as new:
        model.save_pretrained(new)
        if found is not None:
            found.pretrained().save_pretrained(new)
        if state is not None:
            torch.save(state, new / OPTIMIZER)
    return Checkout(
        path=local_path(output),
        step=step,
        tokenizer=None if found is None else found.name,
        notes=tuple(_notes(stored, has_tokenizer=found is not None)),
    )


def check_new_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Check that a checkout may be written to a folder, and return its path.

    Raises
    ------
    RunExists
        If the path exists, and `overwrite` is not set or it is not the folder of a model.
    InvalidArgument
        If the path is an address.
    """
    target = local_path(path).absolute()
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise RunExists(
                f"{path} already exists; choose another path, or replace it with overwrite=True"
            )
        if target.is_symlink() or not (target / "config.json").is_file():
            raise RunExists(f"{path} is not a checkout and is not overwritten; choose another path")
    return target


def _notes(stored: RunParameters, *, has_tokenizer: bool) -> Iterator[str]:
    if not has_tokenizer:
        yield "the run has no tokenizer, so the folder has none; to add one, give tokenizer=…"
    if attribute(stored.attributes, "config", "data", "target_offset") == 2:
        yield (
            "the model predicts the token after next (data.target_offset = 2), so model.generate "
            "skips a token; use: trajstore evaluate RUN generation"
        )
    types = {one.native.name for one in stored.parameters}
    if len(types) > 1:
        yield (
            f"the parameters have several types ({', '.join(sorted(types))}), and from_pretrained "
            "converts them to one; use trajstore.trainers.model_at"
        )
