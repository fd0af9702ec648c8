"""Settings of runs, those that differ between runs, and labels made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

SEED = "config.training.seed"
UNSET = "unset"
"""Text of a setting that is missing or None."""

_GROUPS = "optimizer.groups"
_MOST = 4  # settings in a label


def attribute(attributes: Mapping[str, Any], *path: str) -> Any:
    """Nested value of attributes, or None."""
    value: Any = attributes
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def settings(
    attributes: Mapping[str, Any], keys: Iterable[str] = ("config", "optimizer")
) -> dict[str, Any]:
    """Settings of a run by their full names, such as ``config.training.seed``.

    Parameters
    ----------
    attributes : mapping
        Attributes of the run's root.
    keys : iterable of str
        Names of attributes that hold settings.
    """
    return _flat({key: attributes.get(key) or {} for key in keys})


def comparable_settings(
    runs: Sequence[Mapping[str, Any]], keys: Iterable[str]
) -> list[dict[str, Any]]:
    """Settings of several runs; without the optimizer's groups, unless all runs hold these.

    Only the tier ``everything`` records the groups of the other parameters.
    """
    found = [settings(run, keys) for run in runs]
    if not all(_GROUPS in one for one in found):
        for one in found:
            one.pop(_GROUPS, None)
    return found


def differing_settings(
    runs: Sequence[Mapping[str, Any]], without: Container[str] = ()
) -> dict[str, list[Any]]:
    """Settings in which runs differ, with the value in each run, or None.

    Runs without a configuration are compared by the settings of the optimizer.

    Parameters
    ----------
    runs : sequence of mapping
        Attributes of the roots.
    without : container of str
        Settings to leave out.

    Examples
    --------
    >>> one, other = {"training": {"seed": 1}}, {"training": {"seed": 2, "steps": 5}}
    >>> differing_settings([{"config": one}, {"config": other}])
    {'config.training.seed': [1, 2], 'config.training.steps': [None, 5]}
    """
    known = _known(runs)
    names = dict.fromkeys(name for one in known for name in one)
    found = {name: [one.get(name) for one in known] for name in names}
    return {
        name: values
        for name, values in found.items()
        if name not in without and any(value != values[0] for value in values)
    }


def short_names(runs: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, str]:
    """Short name of each setting; with its section, if several sections have that name."""
    every = dict.fromkeys(name for one in _known(runs) for name in one)
    counts = Counter(name.rpartition(".")[2] for name in every)
    return {
        name: own if counts[own := name.rpartition(".")[2]] == 1 else name.partition(".")[2]
        for name in names
    }


def run_labels(
    runs: Sequence[Mapping[str, Any]], names: Sequence[str], without: Container[str] = ()
) -> list[str]:
    """Unique label of each run, from the settings that differ.

    Parameters
    ----------
    runs : sequence of mapping
        Attributes of the roots.
    names : sequence of str
        Names of the runs. They are the labels if no setting differs, or more than four.
    without : container of str
        Settings to leave out.

    Examples
    --------
    >>> seeds = [{"config": {"training": {"seed": seed}}} for seed in (1, 2, 2)]
    >>> run_labels(seeds, ["a", "b", "c"])
    ['seed=1', 'b: seed=2', 'c: seed=2']
    """
    differing = differing_settings(runs, without)
    if not differing or len(differing) > _MOST:
        return _unique(names)
    short = short_names(runs, differing)
    labels = [
        ", ".join(f"{short[name]}={setting_text(values[at])}" for name, values in differing.items())
        for at in range(len(runs))
    ]
    counts = Counter(labels)
    named = [
        f"{name}: {label}" if counts[label] > 1 else label
        for name, label in zip(names, labels, strict=True)
    ]
    return _unique(named)


def _unique(labels: Sequence[str]) -> list[str]:
    """Labels, with a number appended to repeated ones."""
    seen: Counter[str] = Counter()
    result = []
    for label in labels:
        seen[label] += 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def setting_text(value: Any) -> str:
    """Text of a setting, which is never empty."""
    return UNSET if value is None else str(value)


def _known(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ["config"] if any(run.get("config") for run in runs) else ["optimizer"]
    return comparable_settings(runs, keys)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    return {
        name: one
        for key, item in value.items()
        for name, one in _flat(item, f"{prefix}{key}.").items()
    }
