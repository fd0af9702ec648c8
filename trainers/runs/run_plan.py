"""The plan of a run, before it is recorded: its paths, contents and cost.

With untied weights a training has two runs, one of each matrix. Rows, chunks, memory, raw bytes and
the number of files come from the planner of the writer, so they are exact.
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.optimizer_advice import Advice, advise
from trajstore.populations import populations_from
from trajstore.schema import (
    ALONG_TOKEN,
    COORDINATES,
    EVERYTHING,
    INTEGERS,
    KEPT,
    KEYFRAMES,
    NAMES,
    POPULATION,
    TIERS,
    VARIABLES,
    kept_as,
    resolve_variables,
)
from trajstore.store.metadata.block_plan import Layout
from trajstore.store.metadata.block_plan import plan as plan_layout
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.new_run import compact_rule
from trajstore.trainers.config import RunConfig
from trajstore.trainers.downloads import cached
from trajstore.trainers.recording.options import check_all_tokens, read_tokens, select_tokens
from trajstore.trainers.recording.planned_run import run_path
from trajstore.trainers.rounded_optimizer import OPTIMIZERS
from trajstore.trainers.texts import load_corpus
from trajstore.units import format_bytes, parse_bytes
from trajstore.values.optimizer_rule import MOMENTS, MOMENTUM, numbers_of

UNTIED = ("lm_head.weight", "transformer.wte.weight")
"""Recorded parameters of a model with untied weights. The first run has the checkpoints."""


def matrices(config: RunConfig) -> tuple[str, ...] | None:
    """Return the parameters to record; None for the only matrix.

    Raises
    ------
    InvalidArgument
        If a variable with the state of the whole model is recorded with two matrices.
    """
    if config.model.tied:
        return None
    whole = sorted({*EVERYTHING}.intersection(resolve_variables(config.recording.variables)))
    if whole:
        raise InvalidArgument(
            "the state of the model is recorded with one matrix, but model.tied = false records "
            f"two; remove the tier of {whole[0]!r} from recording.variables"
        )
    return UNTIED


def planned_runs(path: RunPath, config: RunConfig) -> tuple[Location, ...]:
    """Return the paths of the runs that a training records under a name."""
    place = location(path)
    return (place,) if config.model.tied else tuple(run_path(place, name) for name in UNTIED)


def existing_runs(path: RunPath) -> tuple[Location, ...]:
    """Return the paths of the runs of a training, by its name or that of a run; without any, none.

    The two runs of untied weights are named ``NAME.<parameter>.zarr``.
    """
    place = location(path)
    pair = tuple(run_path(_shared_name(place) or place, name) for name in UNTIED)
    if place.exists() and place not in pair:
        return (place,)
    return tuple(run for run in pair if run.exists())


def shared_path(run: Location, config: RunConfig) -> Location:
    """Return the name that a run shares with the other run of its training.

    Raises
    ------
    InvalidArgument
        If the run was renamed, so that the other one is unknown.
    """
    shared = run if config.model.tied else _shared_name(run)
    if shared is None:
        raise InvalidArgument(
            f"{run} is one of the two runs of a training with model.tied = false, but has another "
            f"name; rename both to {' and '.join(f'NAME.{name}.zarr' for name in UNTIED)}"
        )
    return shared


def _shared_name(run: Location) -> Location | None:
    for ending in (f".{name}.zarr" for name in UNTIED):
        if run.name.endswith(ending):
            return run.with_name(f"{run.name.removesuffix(ending)}.zarr")
    return None


_MOMENTS_OF_ALL = tuple(f"params_{name}" for name in MOMENTS)
_FLOAT64 = ("lr", "hyperparameters", "batch", "params_lr", "params_count", "scale", "step_count")
_GROUPS = 2  # of the optimizer: with and without weight decay

_SIZE_ON_DISK = (
    "measured runs are about 2 (float32) to 6 times (bfloat16) smaller on disk than their native "
    "bytes, and 6 to 23 times with the encoding compact; see docs/project/benchmarks.md"
)

_ITEMSIZE = {name: np.dtype(entry.dtype).itemsize if entry.dtype != "string" else 16
             for name, entry in COORDINATES.items()}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run.

    Attributes
    ----------
    steps, every, rows, tokens : int
        Rows include step 0.
    runs : int
        Runs of the training: one for each matrix. All other values are those of one run, except
        `memory` and `files`.
    layout : Layout
        Blocks, shards and chunks.
    memory : int
        Maximum bytes of the writers' memory.
    files : int
    bytes_native : dict of str to int
        Raw bytes of each array in the trainer's type.
    encoding : str
        Encoding in the configuration.
    notes : tuple of str
        Notes about its size.
    advice : tuple of Advice
        Effects that the types of the optimizer's state and of W prevent.
    """

    steps: int
    every: int
    rows: int
    tokens: int
    runs: int
    layout: Layout
    memory: int
    files: int
    bytes_native: dict[str, int]
    encoding: str
    notes: tuple[str, ...]
    advice: tuple[Advice, ...]

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        fields = ("steps", "every", "rows", "tokens", "runs", "files", "encoding", "memory")
        return {
            **{name: getattr(self, name) for name in fields},
            "bytes_native": self.runs * sum(self.bytes_native.values()),
            "block_rows": self.layout.block_rows,
            "arrays": {
                name: {
                    "native_dtype": array.native.name,
                    "chunk": list(array.chunk),
                    "shard": list(array.shard),
                    "bytes_native": self.bytes_native[name],
                }
                for name, array in self.layout.arrays.items()
            },
            "notes": list(self.notes),
            "advice": [item.facts() for item in self.advice],
        }


def native_types(config: RunConfig) -> dict[str, str]:
    """Return the trainer's type of each variable that the configuration records.

    Parameters
    ----------
    config : RunConfig

    Returns
    -------
    dict of str to str
        In the order of the schema; without variables that the run lacks.
    """
    weights, training = config.model.dtype, config.training
    forward = weights if training.autocast == "none" else training.autocast
    types = dict.fromkeys(VARIABLES, "float32")
    types |= dict.fromkeys(("W", "grad", "grad_norm", "clip_coef"), weights)
    types |= dict.fromkeys(MOMENTS, config.optimizer.state_dtype or weights)
    types |= {"logits": forward, "cells": "bfloat16"}
    types |= dict.fromkeys(("hidden_states", "params", "params_grad"), weights)
    types |= dict.fromkeys(_MOMENTS_OF_ALL, config.optimizer.state_dtype or weights)
    types |= dict.fromkeys(INTEGERS, "int64")
    types |= dict.fromkeys(_FLOAT64, "float64")
    # The models have no dropout, and their buffers are fixed; the batches determine their inputs.
    absent = {"random_state", "buffers", "inputs"}
    if config.optimizer.name == "sgd":
        absent |= {*MOMENTS, *_MOMENTS_OF_ALL, "params_count", "step_count"}
    if training.autocast != "float16":
        absent |= {"skipped", "scale"}
    requested = set(config.recording.variables)
    recorded = {
        name: types[name]
        for name in resolve_variables(config.recording.variables)
        if name not in absent or name in requested - set(TIERS)
    }
    if config.optimizer.name == "sgd" and config.optimizer.momentum:
        of_matrix, of_others = kept_as(MOMENTUM, "element")
        if requested & {"matrix", "everything", "state", KEYFRAMES}:
            recorded[of_matrix] = types["exp_avg"]
        if requested & {"everything", "state"}:
            recorded |= {of_others: types["exp_avg"], KEPT.name: "float64"}
    return recorded


def numeric_advice(config: RunConfig) -> list[Advice]:
    """Return advice about types in which the optimizer has no effect.

    Parameters
    ----------
    config : RunConfig

    Returns
    -------
    list of Advice
        The same as for a run with this configuration.
    """
    settings = config.optimizer.model_dump()
    weights = config.model.dtype
    return advise(
        {"class": config.optimizer.name, "hyperparameters": settings},
        state=settings.get("state_dtype") or weights,
        weights=weights,
    )


@checks_types
def plan(
    config: RunConfig,
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> RunPlan:
    """Plan a run.

    Parameters
    ----------
    config : RunConfig
    corpus, tokenizer : path-like, optional
        As for `trainers.record`; read only if the number of recorded tokens depends on them.

    Raises
    ------
    InvalidArgument
        If the memory is too small for a block, or the tokens are impossible.

    Examples
    --------
    >>> from trajstore.trainers import preset
    >>> plan(preset("wordybird-1b")).rows
    201
    """
    recording, model = config.recording, config.model
    types = native_types(config)
    check_all_tokens(types, recording.tokens)
    tokens, has_texts = _recorded_tokens(config, corpus, tokenizer)
    steps, every = config.training.steps, recording.every
    rows = steps // every + 1 + (steps % every > 0)
    notes = [_SIZE_ON_DISK]
    kind = OPTIMIZERS[config.optimizer.name].real_class
    optimizer = {"class": kind.__name__, "hyperparameters": config.optimizer.model_dump()}
    attributes = {"optimizer": optimizer, "recording": {"every": every}}
    settings = inspect.signature(kind).parameters
    defaults = ((name, setting.default) for name, setting in settings.items())
    hyperparameters = len(numbers_of(defaults).keys() - {"lr"})
    rule = None
    if recording.encoding == "compact":
        rule = compact_rule(attributes, types, notes.append)
    runs = len(matrices(config) or ("",))
    if runs > 1:
        notes.append(
            f"model.tied = false: {runs} runs, one of each matrix; sums, memory and files include "
            "all, and the sizes of arrays are those of one"
        )
    layout = plan_layout(
        types,
        tokens=tokens,
        hidden=model.hidden,
        examples=config.examples,
        positions=model.context,
        lengths={
            "element": model.other_elements,
            "group": _GROUPS,
            "parameter": model.parameters,
            "hyperparameter": hyperparameters,
        },
        memory=parse_bytes(recording.memory) // runs,
        block_rows=recording.block_rows,
        encoding=recording.encoding,
        rule=rule,
    )
    native = {name: rows * array.row_bytes for name, array in layout.arrays.items()}
    names = [name for name in ALONG_TOKEN if has_texts or name != "token_text"]
    coordinates = {name: tokens * _ITEMSIZE[name] for name in names}
    coordinates |= {
        f"{POPULATION}{name}": tokens for name in populations_from(recording.populations)
    }
    for axis, count in (("parameter", model.parameters), ("hyperparameter", hyperparameters)):
        if not types.keys().isdisjoint(NAMES[axis]):
            coordinates[axis] = count * _ITEMSIZE[axis]
    native |= coordinates
    if config.has_keyframes:
        changes = {"variables": ("state",), "every": recording.keyframe_every, "block_rows": 1}
        changed = config.model_copy(update={"recording": recording.model_copy(update=changes)})
        keyframes = plan(changed, corpus=corpus, tokenizer=tokenizer)
        size, memory = sum(keyframes.bytes_native.values()), keyframes.memory
        notes += [f"{keyframes.rows} keyframes take up to {format_bytes(size)} more on disk, and "
                  f"{format_bytes(memory)} of memory"]  # fmt: skip
    blocks = math.ceil(rows / layout.block_rows)
    return RunPlan(
        steps=steps,
        every=every,
        rows=rows,
        tokens=tokens,
        runs=runs,
        layout=layout,
        memory=runs * layout.memory,
        # Each array has metadata and one shard per block, or one chunk; and there is the root.
        files=runs * (len(layout.arrays) * (blocks + 1) + len(coordinates) * 2 + 1),
        bytes_native=native,
        encoding=recording.encoding,
        notes=tuple(notes),
        advice=tuple(numeric_advice(config)),
    )


def _recorded_tokens(
    config: RunConfig,
    corpus: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | None,
) -> tuple[int, bool]:
    """Return the number of recorded tokens, and True if their texts are known."""
    recorded, name = config.recording.tokens, config.data.tokenizer
    if recorded in ("dead", "live"):
        text = load_corpus(config, corpus=corpus, tokenizer=tokenizer)
        ids = select_tokens(recorded, config.model.vocab_size, text.counts() == 0)
        assert ids is not None
        return len(ids), text.token_text is not None
    has_texts = name == "ascii" or tokenizer is not None
    has_texts = has_texts or (name != "none" and cached(name) is not None)
    if recorded == "all":
        return config.model.vocab_size, has_texts
    ids = select_tokens(read_tokens(recorded), config.model.vocab_size, None)
    assert ids is not None
    return len(ids), has_texts
