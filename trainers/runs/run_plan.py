"""The plan of a run, before it is recorded: its paths, contents and cost.

With untied weights a training has two runs, one of each matrix. Rows, chunks, memory, raw bytes and
the number of files come from the planner of the writer, so they are exact. Bytes on disk are
estimates from measured runs.
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, argument
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
from trajstore.values.optimizer_rule import MOMENTS, MOMENTUM, VECTORS, OptimizerRule, numbers_of

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
    """Return the paths of the runs that a training has recorded under a name; none without any."""
    place = location(path)
    if place.exists():
        return (place,)
    return tuple(run for name in UNTIED if (run := run_path(place, name)).exists())


def shared_path(run: Location, config: RunConfig) -> Location:
    """Return the name that a run shares with the other run of its training.

    Raises
    ------
    InvalidArgument
        If the run was renamed, so that the other one is unknown.
    """
    if config.model.tied:
        return run
    for ending in (f".{name}.zarr" for name in UNTIED):
        if run.name.endswith(ending):
            return run.with_name(f"{run.name.removesuffix(ending)}.zarr")
    raise InvalidArgument(
        f"{run} is one of the two runs of a training with model.tied = false, but has another "
        f"name; rename both to {' and '.join(f'NAME.{name}.zarr' for name in UNTIED)}"
    )


_MOMENTS_OF_ALL = tuple(f"params_{name}" for name in MOMENTS)
_GROUPS = 2  # of the optimizer: with and without weight decay

# Ratio of native bytes to bytes on disk. bfloat16: measured on the first 32 rows of Wordybird 1b on
# real text (blocks of 16 rows). Later steps change less and compress better. float32, and the cells
# of float32 weights: measured on 200 steps of Duckling (blocks of 16 rows). Hidden states: measured
# on 200 steps of Gatsby; vectors of all parameters: on 1,000 steps of it, in float32 on 150. Other
# types are not measured; no compression is assumed.
_RATIOS = {
    "bfloat16": {
        "W": 1.6, "grad": 2.55, "exp_avg": 2.55, "exp_avg_sq": 2.8, "logits": 1.95, "cells": 2.8,
        "hidden_states": 2.9,
        "params": 4.0, "params_grad": 1.44, "params_exp_avg": 1.5, "params_exp_avg_sq": 8.2,
    },
    "float32": {
        "W": 1.4, "grad": 2.2, "exp_avg": 1.35, "exp_avg_sq": 1.8,
        "params": 1.6, "params_grad": 2.3, "params_exp_avg": 1.15, "params_exp_avg_sq": 1.9,
    },
}  # fmt: skip

# The same for models so small that a block has many rows: measured on 30 to 1,000 steps of Gatsby
# (blocks of 256 rows). Sums are within 30 % of the measured ones, also with the encoding `compact`.
_MANY_ROWS = 128
_RATIOS_OF_MANY_ROWS = {
    "bfloat16": _RATIOS["bfloat16"]
    | {"W": 13.0, "grad": 3.0, "exp_avg": 4.0, "exp_avg_sq": 12.0, "logits": 4.0},
}

# The same for the encoding `compact`: of the gradient, and of the first row of each block, which a
# computed array stores. Measured on the first 63 rows of Wordybird 1b, and on 32 of Duckling, whose
# float32 W includes the corrections of 1 % of its elements.
_PREDICTED = {"bfloat16": 7.0, "float32": 2.8}
_LEARNING_ROWS, _LEARNING, _LATER = 256, 4.8, 2.3  # then the gradients of Gatsby are noise
_KEY_ROWS = {
    "bfloat16": {"W": 1.3, "exp_avg": 2.1, "exp_avg_sq": 1.9},
    "float32": {"W": 1.0, "exp_avg": 1.25, "exp_avg_sq": 1.2},
}

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
        `memory`, `files` and the sums of `totals`.
    layout : Layout
        Blocks, shards and chunks.
    memory : int
        Maximum bytes of the writers' memory.
    files : int
    bytes_native : dict of str to int
        Raw bytes of each array in the trainer's type.
    encoding : str
        Encoding in the configuration.
    bytes_by_encoding : dict of str to dict
        Bytes on disk of each array, by encoding: estimates from measured ratios.
    remarks : tuple of str
        Reason why the encoding ``compact`` of the configuration would compute nothing.
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
    bytes_by_encoding: dict[str, dict[str, int]]
    remarks: tuple[str, ...]
    advice: tuple[Advice, ...]

    @property
    def bytes_on_disk(self) -> dict[str, int]:
        """Of each array, in the encoding of the configuration."""
        return self.bytes_by_encoding[self.encoding]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about its size."""
        W = self.layout.arrays.get("W")
        remarks = self.remarks
        if self.runs > 1:
            remarks += (
                f"model.tied = false: {self.runs} runs, one of each matrix; sums, memory and files "
                "include all, and the sizes of arrays are those of one",
            )
        if W is None or W.native.name != "float32":
            return remarks
        step = self.bytes_on_disk["W"] / self.rows
        cells = W.row_bytes / 2 / _RATIOS["bfloat16"]["cells"]
        return (
            *remarks,
            "the upper half of a float32 W compresses, but the lower 16 bits of the mantissa do "
            f"not; W takes about {format_bytes(round(step))} per step, and its bfloat16 cells "
            "(" + argument("variables", "'cells'") + f") about {format_bytes(round(cells))}",
        )

    def totals(self) -> dict[str, Any]:
        """Return bytes and memory of the whole run, and rows of a block."""
        return {
            "bytes_native": self.runs * sum(self.bytes_native.values()),
            "bytes_on_disk": self.runs * sum(self.bytes_on_disk.values()),
            "bytes_by_encoding": {
                name: self.runs * sum(sizes.values())
                for name, sizes in self.bytes_by_encoding.items()
            },
            "memory": self.memory,
            "block_rows": self.layout.block_rows,
        }

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON values; bytes on disk are estimates."""
        fields = ("steps", "every", "rows", "tokens", "runs", "files", "encoding")
        return {
            **{name: getattr(self, name) for name in fields},
            **self.totals(),
            "arrays": {
                name: {
                    "native_dtype": array.native.name,
                    "chunk": list(array.chunk),
                    "shard": list(array.shard),
                    "bytes_native": self.bytes_native[name],
                    "bytes_on_disk": self.bytes_on_disk[name],
                    "bytes_by_encoding": {
                        encoding: sizes[name] for encoding, sizes in self.bytes_by_encoding.items()
                    },
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
    types |= {"logits": forward, "lr": "float64", "cells": "bfloat16"}
    types |= {"hyperparameters": "float64"}
    types |= {"batch": "float64", "hidden_states": weights}
    types |= dict.fromkeys(("params", "params_grad"), weights)
    types |= dict.fromkeys(_MOMENTS_OF_ALL, config.optimizer.state_dtype or weights)
    types |= dict.fromkeys(INTEGERS, "int64")
    types |= dict.fromkeys(("params_lr", "params_count", "scale", "step_count"), "float64")
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
    remarks: list[str] = []
    optimizer = {
        "class": OPTIMIZERS[config.optimizer.name].real_class.__name__,
        "hyperparameters": config.optimizer.model_dump(),
    }
    attributes = {"optimizer": optimizer, "recording": {"every": every}}
    settings = inspect.signature(OPTIMIZERS[config.optimizer.name].real_class).parameters
    defaults = ((name, setting.default) for name, setting in settings.items())
    hyperparameters = len(numbers_of(defaults).keys() - {"lr"})
    computes = recording.encoding == "compact"
    note = remarks.append if computes else lambda sentence: None
    rule = compact_rule(attributes, types, note)
    runs = len(matrices(config) or ("",))
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
        rule=rule if computes else None,
    )
    native = {name: rows * array.row_bytes for name, array in layout.arrays.items()}
    coordinates = {
        name: tokens * _ITEMSIZE[name] for name in ALONG_TOKEN if has_texts or name != "token_text"
    }
    coordinates |= {
        f"{POPULATION}{name}": tokens for name in populations_from(recording.populations)
    }
    for axis, count in (("parameter", model.parameters), ("hyperparameter", hyperparameters)):
        if not types.keys().isdisjoint(NAMES[axis]):
            coordinates[axis] = count * _ITEMSIZE[axis]
    native |= coordinates
    blocks = math.ceil(rows / layout.block_rows)
    if config.has_keyframes:
        changes = {"variables": ("state",), "every": recording.keyframe_every, "block_rows": 1}
        changed = config.model_copy(update={"recording": recording.model_copy(update=changes)})
        keyframes = plan(changed, corpus=corpus, tokenizer=tokenizer)
        size, memory = sum(keyframes.bytes_native.values()), keyframes.memory
        remarks += [f"{keyframes.rows} keyframes take up to {format_bytes(size)} more on disk, and "
                    f"{format_bytes(memory)} of memory"]  # fmt: skip
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
        bytes_by_encoding=_bytes_by_encoding(native, layout, blocks, rule),
        remarks=tuple(remarks),
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


def _bytes_by_encoding(
    native: dict[str, int], layout: Layout, blocks: int, rule: OptimizerRule | None
) -> dict[str, dict[str, int]]:
    """Expected bytes on disk of each array, of which some are computed by a rule."""
    kinds = {name: array.native.name for name, array in layout.arrays.items()}
    many = layout.block_rows >= _MANY_ROWS
    ratios = _RATIOS | _RATIOS_OF_MANY_ROWS if many else _RATIOS
    delta = {
        name: round(size / ratios.get(kinds.get(name, ""), {}).get(name, 1.0))
        for name, size in native.items()
    }
    compact = dict(delta)
    if "grad" in kinds:
        ratio = _PREDICTED.get(kinds["grad"], 1.0)
        if many and kinds["grad"] == "bfloat16":
            rows = native["grad"] / layout.arrays["grad"].row_bytes
            early = min(rows, _LEARNING_ROWS)
            ratio = rows / (early / _LEARNING + (rows - early) / _LATER)
        compact["grad"] = round(native["grad"] / ratio)
    computed = rule.state if rule else ()
    vectors = [VECTORS[name] for name in computed if rule and rule.kind == "adam"]
    for name in (*computed, *(name for name in vectors if name in kinds)):
        ratio = _KEY_ROWS.get(kinds[name], {}).get(name, 1.0)
        compact[name] = round(blocks * layout.arrays[name].row_bytes / ratio)
    return {"delta": delta, "compact": compact}
