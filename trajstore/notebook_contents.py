"""What a safetensors file holds: one of `trajstore.export`, or one of a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.bits import NATIVE_TYPES
from trajstore.contents import (
    DEAD_IDS,
    Content,
    Held,
    checked_texts,
    dead_tokens,
    is_blank,
    kept_attributes,
    listed,
    parsed_json,
    token_ids,
    unfit,
)
from trajstore.errors import FormatError
from trajstore.labels import true_steps
from trajstore.layouts import NOTEBOOKS, Notebook
from trajstore.safetensors import SafetensorsFile
from trajstore.schema import COORDINATES, VARIABLES

__all__ = ["safetensors_content"]

Array = npt.NDArray[Any]


def safetensors_content(file: SafetensorsFile, layout: str | None = None) -> Content:
    """Content of a safetensors file.

    Raises
    ------
    FormatError
        If it is of no known layout, lacks what its layout requires, or shapes or types disagree.
    """
    layout = layout or _recognised(file)
    if layout == "native":
        return _native(file)
    return _notebook(file, NOTEBOOKS[layout])


def _recognised(file: SafetensorsFile) -> str:
    if file.metadata.get("format") == "trajstore":
        return "native"
    keys = file.entries.keys()
    if file.metadata.get("layout") in NOTEBOOKS:
        return file.metadata["layout"]
    fitting = [name for name, notebook in NOTEBOOKS.items() if keys >= set(notebook.required)]
    if len(fitting) > 1:
        # 15.1a and 1.12f share their keys; the one is float32, the other bfloat16.
        dtype = file.entries["embeddings"].dtype if "embeddings" in keys else None
        matching = [
            name
            for name in fitting
            if any(c.key == "embeddings" and c.dtype == dtype for c in NOTEBOOKS[name].columns)
        ]
        fitting = matching or fitting
    if not fitting:
        required = "; ".join(f"{n.name}: {', '.join(n.required)}" for n in NOTEBOOKS.values())
        raise FormatError(
            f"{file.path} is of no known layout: it holds {listed(keys)}, and the layouts require "
            f"— {required}"
        )
    return fitting[0]


def _native(file: SafetensorsFile) -> Content:
    _require(file, "native", ("step", "token"))
    steps, _ = true_steps(_vector(file, "step", ("int64",)), trusted=True)
    token = _vector(file, "token", ("int32", "int64"))
    held = _held(
        file,
        {name: (name, "after") for name in VARIABLES if name in file.entries},
        len(steps),
        len(token),
    )
    coordinates: dict[str, Any] = {}
    for name, entry in COORDINATES.items():
        if name == "token":
            continue
        if entry.dtype == "string":
            if name in file.metadata:
                coordinates[name] = checked_texts(
                    file, name, parsed_json(file, file.metadata[name]), len(token)
                )
        elif name in file.entries:
            coordinates[name] = _vector(file, name, (entry.dtype,), len(token))
    attributes = parsed_json(file, file.metadata.get("attributes", "{}"))
    return Content(
        layout="native",
        steps=steps,
        token=token_ids(file, token),
        hidden=_hidden(file, held),
        coordinates=coordinates,
        held=held,
        attributes=kept_attributes(file, attributes),
        exact=True,
    )


def _notebook(file: SafetensorsFile, notebook: Notebook) -> Content:
    _require(file, notebook.name, notebook.required)
    notes: list[str] = []
    columns = [column for column in notebook.columns if column.key in file.entries]
    absent = [column.key for column in notebook.columns if column.key not in file.entries]
    if absent:
        notes.append(f"the file does not hold {', '.join(absent)}")
    shape = file.entries[columns[0].key].shape
    if len(shape) != 3:
        raise unfit(file, f"{columns[0].key} has shape {shape}, expected (step, token, hidden)")
    rows, tokens = shape[:2]
    if "recorded_steps" in file.entries:
        labels = _vector(file, "recorded_steps", ("int64", "int32"), rows)
        trusted = file.metadata.get("steps") == "optimizer"
        steps, corrected = true_steps(labels, trusted=trusted)
        if corrected:
            notes.append(corrected)
    else:
        steps = np.arange(rows, dtype=np.int64)
        if notebook.has_steps:
            notes.append(f"the file labels no steps; its rows were taken as steps 0 to {rows - 1}")
    token = np.arange(tokens, dtype=np.int32)
    if "token" in file.entries:
        token = _vector(file, "token", ("int32", "int64"), tokens)
    names: dict[str, tuple[str, Literal["after", "before"]]] = {}
    for column in columns:
        if column.time == "change":
            names[column.key] = ("delta", "after")
            notes.append(f"{column.key} became delta; the file holds no initial W, hence no W")
        else:
            names[column.key] = (column.variable, column.time)
    held = _held(file, names, rows, tokens)
    notes += _check_start(file, notebook, held, steps)
    dead = {key: file.entries[key] for key in DEAD_IDS if key in file.entries}
    coordinates = {}
    if dead:
        is_dead = dead_tokens(
            file.path, {key: _vector(file, key, ("int64", "int32")) for key in dead}, tokens
        )
        coordinates["is_dead"] = is_dead
    else:
        notes.append("the file does not tell which tokens are dead")
    if any(held_.time == "before" for held_ in held):
        late = [held_.variable for held_ in held if held_.time == "before"]
        notes.append(
            f"{', '.join(late)} are those before the step of their row and were shifted by one; "
            f"after step {steps[-1]} they are not in the file, and NaN in the run"
        )
    return Content(
        layout=notebook.name,
        steps=steps,
        token=token_ids(file, token),
        hidden=_hidden(file, held),
        coordinates=coordinates,
        held=held,
        attributes=_told(file, notebook),
        exact=False,
        notes=tuple(notes),
    )


def _check_start(
    file: SafetensorsFile, notebook: Notebook, held: Iterable[Held], steps: Array
) -> list[str]:
    """Whether the first row and the spacing are what the layout means by them."""
    notes = []
    for one in held:
        if one.time == "before" and (np.diff(steps) != 1).any():
            raise unfit(
                file,
                f"{one.key} is that before the step of its row, so its steps must follow one "
                "another; take the run that it was exported from",
            )
        if steps[0] != 0:
            continue
        if one.time == "before":
            if one.rows > 1 and not np.array_equal(one.read(0, 1), one.read(1, 2)):
                raise unfit(
                    file,
                    f"{one.key} differs between rows 0 and 1, but in layout {notebook.name} "
                    "both come before step 1",
                )
        elif VARIABLES[one.variable].row0 == "nan" and not is_blank(one):
            if notebook.name == "1.12a" and one.variable == "logits":
                notes.append(
                    "logits of row 0 are of a forward pass that no step made; they were left out"
                )
            else:
                raise unfit(
                    file,
                    f"{one.key} has values in row 0, where no step had been taken; this is "
                    f"not the alignment of layout {notebook.name}",
                )
    return notes


def _held(
    file: SafetensorsFile,
    names: Mapping[str, tuple[str, Literal["after", "before"]]],
    rows: int,
    tokens: int,
) -> tuple[Held, ...]:
    hidden: int | None = None
    made = []
    for key, (variable, time) in names.items():
        entry, dims = file.entries[key], VARIABLES[variable].dims
        if len(entry.shape) == len(dims) and "hidden" in dims and hidden is None:
            hidden = entry.shape[dims.index("hidden")]
        lengths = {"step": rows, "token": tokens, "hidden": hidden}
        expected = tuple(lengths[dim] for dim in dims)
        if entry.shape != expected:
            raise unfit(file, f"{key} has shape {entry.shape}, expected {expected}")
        if not all(entry.shape):
            raise unfit(file, f"{key} has shape {entry.shape}, which holds nothing")
        if entry.dtype not in NATIVE_TYPES:
            raise unfit(file, f"{key} is of type {entry.dtype}, expected {', '.join(NATIVE_TYPES)}")

        def read(start: int, stop: int, key: str = key) -> Array:
            return file.read(key, start, stop)

        native = NATIVE_TYPES[entry.dtype]
        made.append(
            Held(
                variable=variable,
                key=key,
                native=native,
                wanted=native,
                rows=rows,
                row_shape=entry.shape[1:],
                time=time,
                read=read,
            )
        )
    if not any(held.variable in ("W", "delta") for held in made):
        raise unfit(file, "it holds no W, without which there is no run")
    return tuple(made)


def _hidden(file: SafetensorsFile, held: Iterable[Held]) -> int:
    return next(one.row_shape[1] for one in held if one.variable in ("W", "delta"))


def _require(file: SafetensorsFile, layout: str, keys: Iterable[str]) -> None:
    missing = [key for key in keys if key not in file.entries]
    if missing:
        raise unfit(
            file, f"layout {layout} requires {', '.join(missing)}; it holds {listed(file.entries)}"
        )


def _vector(
    file: SafetensorsFile, key: str, dtypes: tuple[str, ...], length: int | None = None
) -> Array:
    entry = file.entries[key]
    fits = len(entry.shape) == 1 and (length is None or entry.shape[0] == length)
    if entry.dtype not in dtypes or not fits:
        raise unfit(
            file,
            f"{key} is {entry.dtype} of shape {entry.shape}, expected {' or '.join(dtypes)} of "
            f"shape ({'any' if length is None else length},)",
        )
    if key in ("step", "token") and not entry.shape[0]:
        raise unfit(file, f"{key} is empty")
    if entry.dtype == "bool":
        values = file.read(key).view(np.uint8)
        if values.max(initial=0) > 1:
            raise unfit(file, f"{key} holds other bytes than 0 and 1")
        return values.astype(bool)
    return file.read(key)


def _told(file: SafetensorsFile, notebook: Notebook) -> dict[str, Any]:
    """Attributes that the extra scalars and the metadata of a notebook's file tell."""
    attributes: dict[str, Any] = {}
    for scalar in notebook.scalars:
        entry = file.entries.get(scalar.key)
        if entry is None:
            continue
        if entry.dtype not in ("float32", "float64") or entry.shape != ():
            raise unfit(
                file, f"{scalar.key} is {entry.dtype} of shape {entry.shape}, expected a float32"
            )
        bits = file.read(scalar.key)
        # The shortest decimal that is this float32, as 0.001 was written, not its float64 tail.
        value = float(str(bits.view("f4" if entry.dtype == "float32" else "f8")[()]))
        if math.isfinite(value):
            _put(attributes, scalar.paths[0], value)
    hyperparameters = attributes.get("optimizer", {}).get("hyperparameters", {})
    betas = hyperparameters.pop("betas", {})
    if len(betas) == 2:
        hyperparameters["betas"] = [betas["0"], betas["1"]]
    names = {
        "vocab_size": ("model", "vocab_size"),
        "hidden_dim": ("model", "hidden"),
        "n_layers": ("model", "layers"),
        "n_heads": ("model", "heads"),
        "n_steps": ("training", "steps"),
        "batch_size": ("training", "batch_size"),
    }
    if notebook.name == "1.12a":
        for key, path in names.items():
            text = file.metadata.get(key, "")
            if text.isdecimal() and len(text) < 16:
                _put(attributes, ("config", *path), int(text))
        try:
            rate = float(file.metadata.get("learning_rate", "nan"))
        except ValueError:
            rate = math.nan
        if math.isfinite(rate):
            _put(attributes, ("optimizer", "hyperparameters", "initial_lr"), rate)
    return attributes


def _put(attributes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        attributes = attributes.setdefault(key, {})
    attributes[last] = value
