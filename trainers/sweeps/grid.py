"""The runs of a sweep and their names: the product of its seeds and settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.errors import InvalidArgument
from trajstore.trainers.config import RunConfig, field_name

_SEED = "training.seed"
_LONGEST_NAME = 240  # bytes; file systems take 255, and a lock has a longer name than its run

_OPENING, _CLOSING, _QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep.

    Attributes
    ----------
    name : str
        Name of its folder, ``gatsby_initialization.sigma=1e-5_seed=1601.zarr``.
    assignments : tuple of str
        ``section.field=value``, one value each.
    seed : int or None
    config : RunConfig
        The complete configuration.
    """

    name: str
    assignments: tuple[str, ...]
    seed: int | None
    config: RunConfig


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in a text.

    Parameters
    ----------
    text : str
        Numbers and ranges, separated by commas. A range ``A:B`` excludes B, as in Python.

    Raises
    ------
    InvalidArgument
        If the text is anything else, is empty, or has a seed twice.

    Examples
    --------
    >>> parse_seeds("1601:1604,42")
    [1601, 1602, 1603, 42]
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", part)
        if found is None:
            raise InvalidArgument(
                f"got the seeds {text!r}, expected numbers and ranges, such as 1601:1617 or 1,2,3"
            )
        first = int(found[1])
        seeds += range(first, int(found[2])) if found[2] else [first]
    if not seeds or len(set(seeds)) < len(seeds):
        problem = "repeat a seed" if seeds else "are empty"
        raise InvalidArgument(
            f"the seeds {text!r} {problem}; give different numbers, and ranges A:B with A < B"
        )
    return seeds


def split_values(text: str) -> list[str]:
    """Split a text at its commas, except within brackets, braces and quotes.

    Raises
    ------
    InvalidArgument
        If one of several is empty.

    Examples
    --------
    >>> split_values("1e-5,1e-4"), split_values("[0.9, 0.99],[0.9, 0.999]"), split_values('"a,b"')
    (['1e-5', '1e-4'], ['[0.9, 0.99]', '[0.9, 0.999]'], ['"a,b"'])
    """
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES:
            quote = sign
        else:
            depth += (sign in _OPENING) - (sign in _CLOSING)
        if sign == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += sign
    values = [value.strip() for value in values]
    if len(values) > 1 and not all(values):
        raise InvalidArgument(f"got the values {text!r}, of which one is empty; remove a comma")
    return values


def swept_runs(
    base: RunConfig,
    stem: str,
    assignments: Sequence[str],
    seeds: Sequence[int] | None = None,
    common: Sequence[str] = (),
) -> list[SweptRun]:
    """Return all runs of a sweep; the seed changes fastest, then the last setting.

    The name of a run has every setting of `assignments`, also one with a single value, and the
    seed. So a run keeps its name when more values are swept.

    Parameters
    ----------
    base : RunConfig
        The configuration of a preset or a file with the name `stem`.
    assignments : sequence of str
        ``section.field=value,value``.
    seeds : sequence of int, optional
    common : sequence of str
        ``section.field=value`` for all runs; they are not in the names.

    Raises
    ------
    ConfigError
        If a field is unknown, or a value is impossible.
    InvalidArgument
        If a field is given twice, two runs have the same name, or a name is too long.

    Examples
    --------
    >>> from trajstore.trainers import preset
    >>> runs = swept_runs(preset("gatsby"), "gatsby", ["initialization.sigma=1e-5,1e-4"], [1, 2])
    >>> [run.name for run in runs][:2]
    ['gatsby_initialization.sigma=1e-5_seed=1.zarr', 'gatsby_initialization.sigma=1e-5_seed=2.zarr']
    """
    axes = []
    fields = [field_name(assignment) for assignment in assignments]
    for field in [*fields, *([_SEED] if seeds is not None else [])]:
        if (fields + [_SEED] * (seeds is not None)).count(field) > 1:
            raise InvalidArgument(f"{field} is given twice; give all its values in one option")
    for field, assignment in zip(fields, assignments, strict=True):
        values = split_values(assignment.partition("=")[2])
        axes.append([f"{field}={value}" if "=" in assignment else assignment for value in values])
    runs: dict[str, SweptRun] = {}
    for chosen in itertools.product(*axes):
        for seed in [None] if seeds is None else seeds:
            more = [] if seed is None else [f"{_SEED}={seed}"]
            config = base.with_values([*chosen, *common, *more])
            name = _name(stem, config, fields, seed)
            if name in runs:
                raise InvalidArgument(
                    f"two runs have the name {name}: {', '.join(chosen)} and "
                    f"{', '.join(runs[name].assignments)}; leave out one of them"
                )
            runs[name] = SweptRun(name=name, assignments=chosen, seed=seed, config=config)
    return list(runs.values())


def _name(stem: str, config: RunConfig, fields: Sequence[str], seed: int | None) -> str:
    values = config.flat()
    parts = [stem, *(f"{field}={_text(values[field])}" for field in fields)]
    if seed is not None:
        parts.append(f"seed={seed}")
    name = "_".join(parts) + ".zarr"
    if len(name.encode()) > _LONGEST_NAME:
        raise InvalidArgument(
            f"the name of the run {name} is too long for a file system; put the common settings "
            "into a file (--config FILE)"
        )
    return name


def _text(value: Any) -> str:
    """Return a value as text for a file name, the same for all spellings of the value."""
    if isinstance(value, list):
        return "+".join(map(_text, value))
    text = re.sub(r"e([+-])0+", r"e\1", repr(value)) if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")
