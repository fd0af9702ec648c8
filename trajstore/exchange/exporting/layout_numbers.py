"""Numbers of a file in a layout, from the attributes and lengths of its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from trajstore.exchange.exporting.layout_columns import is_sgd
from trajstore.exchange.layouts import COUNTS, RECORDED, Layout
from trajstore.exchange.selection import Selection
from trajstore.exchange.usual_names import Scalar, scalar_of
from trajstore.schema import VARIABLES
from trajstore.store.reading.run_info import attribute


def file_numbers(
    layout: Layout, parts: Sequence[Selection], held: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Known numbers of the layout, and notes on the others.

    Parameters
    ----------
    layout : Layout
    parts : sequence
    held : collection of str
        Keys of the arrays in the file.
    """
    numbers: dict[str, Any] = {}
    unknown, different = [], []
    for key in layout.numbers:
        if key in COUNTS:
            value = _count(layout, parts[0], marks_dead=COUNTS[key])
            if value is not None:
                numbers[key] = value
        elif key.startswith(RECORDED):
            numbers[key] = key.removeprefix(RECORDED) in held
        elif key == "n_runs":
            numbers[key] = len(parts)
        else:
            values = [number_of(key, part) for part in parts]
            if key == "tied_weights" and layout.runs == "matrices":
                values = [False] * len(parts)
            if key == "base_seed" and None in values:
                values = [
                    None if seed is None else seed - number
                    for number, seed in enumerate(number_of("seed", part) for part in parts)
                ]
            if None in values:
                unknown.append(key)
            elif layout.runs and (scalar := scalar_of(key)) and key not in scalar.names:
                # The plural of a number, which has a value per run.
                numbers[key] = values
            elif len(set(values)) == 1:
                numbers[key] = values[0]
            else:
                different.append(key)
    notes = [f"{', '.join(unknown)} omitted: not in the run's attributes"] if unknown else []
    if different:
        notes.append(f"{', '.join(different)} omitted: the runs differ")
    return numbers, notes


def _count(layout: Layout, part: Selection, *, marks_dead: bool) -> int | None:
    """Number of dead or of live tokens."""
    coordinates = part.coordinates if layout.only is None else part.run.coordinates
    if "is_dead" not in coordinates:
        return None
    return int(np.count_nonzero(coordinates["is_dead"].astype(bool) == marks_dead))


def number_of(key: str, part: Selection) -> int | float | None:
    """A number of a run, from its attributes, or the length of what is selected.

    Of an imported run, also a number under a name that only its file had.
    """
    attributes, scalar = part.run.attributes, scalar_of(key)
    value = None if scalar is None else _value_of(attributes, scalar)
    name = "" if scalar is None else scalar.name
    if value is None and name in ("adam_beta1", "adam_beta2") and is_sgd(part.run):
        return 0.0
    if value is None or name == "num_steps":
        value = _length(name, part)
    if value is None:
        value = attribute(attributes, "config", "scalars", key)
    return value if isinstance(value, int | float) else None


def _length(name: str, part: Selection) -> int | None:
    """The length that a scalar means. Steps are the rows but one: ``W[num_steps]`` is the last."""
    if name == "num_steps":
        return len(part.steps) - 1
    if name == "hidden_dim":
        matrices = (one for one in part.run.series.values() if one.dims == VARIABLES["W"].dims)
        return next((one.shape[2] for one in matrices), None)
    ids = part.run.coordinates["token"]
    is_whole = np.array_equal(ids, np.arange(len(ids)))
    return len(ids) if name == "vocab_size" and is_whole else None


def _value_of(attributes: Mapping[str, Any], scalar: Scalar) -> Any:
    """Value of a scalar; None if the attributes do not hold it."""
    for path in scalar.paths:
        value = attribute(attributes, *path)
        if isinstance(value, str) and value in scalar.codes:
            return scalar.codes[value]
        if isinstance(value, int | float) and not scalar.codes:
            return value
    return None
