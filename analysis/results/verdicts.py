"""Sentences about the tokens of a run, with their numbers, and the commands that reproduce it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import xarray as xr

from trajstore.analysis.motion.crossings import discontinuities
from trajstore.analysis.motion.freezing import freeze
from trajstore.analysis.motion.vectors import grad_norms
from trajstore.analysis.optimizer.freeze_causes import CAUSES, freeze_cause
from trajstore.analysis.scan.input_checks import available
from trajstore.analysis.scan.result_variables import count_by_population
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import populations
from trajstore.provenance import RunAttributes
from trajstore.store.metadata.metadata_form import Segment, trained_segments


def evidence(scan: Scan, min_unchanged: int) -> tuple[dict[str, xr.Dataset], dict[str, str]]:
    """Lazy data for the sentences, and the reason for what is not available, by name."""
    questions: dict[str, Callable[[Scan], xr.Dataset]] = {
        "gradients": _gradients,
        "freezing": partial(_freezing, min_unchanged=min_unchanged),
        "causes": _causes,
        "discontinuities": lambda scan: discontinuities(scan)[["discontinuity"]],
    }

    def data_of(name: str) -> xr.Dataset:
        scan.require_rows(2, name)
        return questions[name](scan)

    return available({name: partial(data_of, name) for name in questions})


def _gradients(scan: Scan) -> xr.Dataset:
    norms = grad_norms(scan).isel(step=slice(1, None))
    counts = count_by_population((norms == 0).astype(np.int8), 2, "zero")
    return xr.Dataset({"counts": counts.sum("step")})


def _freezing(scan: Scan, min_unchanged: int) -> xr.Dataset:
    names, groups = populations(scan.ds)
    facts = freeze(scan, min_unchanged)[["last_motion", "frozen_since", "moves"]]
    return facts.assign(member=(("population", "token"), groups)).assign_coords(population=names)


def _causes(scan: Scan) -> xr.Dataset:
    counts = count_by_population(freeze_cause(scan), len(CAUSES), "cause")
    return xr.Dataset({"counts": counts.sum("step").assign_coords(cause=list(CAUSES))})


def verdicts(evidence_of: dict[str, xr.Dataset], population: str, min_unchanged: int) -> list[str]:
    """Write the sentences about one population.

    Parameters
    ----------
    evidence_of : dict
        Computed `evidence`.
    population : str
        Name of a population with tokens.
    min_unchanged : int
        As for `evidence`.
    """
    sentences: list[str] = []
    if "gradients" in evidence_of:
        sentences.append(
            _of_gradients(evidence_of["gradients"]["counts"].sel(population=population))
        )
    if "freezing" in evidence_of:
        sentences.append(_of_freezing(evidence_of["freezing"], population, min_unchanged))
    if "causes" in evidence_of:
        sentences.append(_of_causes(evidence_of["causes"]["counts"].sel(population=population)))
    return [sentence for sentence in sentences if sentence]


def _of_gradients(counts: xr.DataArray) -> str:
    other, zero = (int(number) for number in counts.values)
    if not zero:
        return f"No gradient was zero, of {other:,} gradients (tokens × steps)."
    share = zero / (zero + other)
    return f"{share:.1%} of the gradients were exactly zero: {zero:,} of {zero + other:,}."


def _of_freezing(freezing: xr.Dataset, population: str, min_unchanged: int) -> str:
    member = freezing["member"].sel(population=population).values
    since, last = freezing["frozen_since"].values[member], freezing["last_motion"].values[member]
    frozen = since >= 0
    unchanged = f"unchanged for the last {min_unchanged:,} step{'s' * (min_unchanged > 1)} or more"
    if not frozen.any():
        return f"No token was frozen ({unchanged})."
    if frozen.all():
        first, final = int(since.min()), int(since.max())
        when = f"by step {final:,}" if first < final else f"at step {final:,}"
        return f"All tokens were frozen {when} ({unchanged})" + (
            f"; the first at step {first:,}." if first < final else "."
        )
    never = int((last < 0).sum())
    return (
        f"{int(frozen.sum()):,} of {frozen.size:,} were frozen, {frozen.mean():.1%} ({unchanged}); "
        f"the first at step {int(since[frozen].min()):,}"
        + (f"; {never:,} never changed." if never else ".")
    )


def _of_causes(counts: xr.DataArray) -> str:
    unchanged = counts.drop_sel(cause="moved")
    total = int(unchanged.sum())
    if not total:
        return "Every token changed at every step."
    parts = [
        f"{int(number) / total:.1%} {str(cause).replace('_', ' ')}"
        for cause, number in zip(unchanged["cause"].values, unchanged.values, strict=True)
        if number
    ]
    return f"Causes of {total:,} steps without change (tokens × steps): {', '.join(parts)}."


def discontinuity_verdict(evidence_of: dict[str, xr.Dataset]) -> str:
    """Sentence about discontinuities of the motion."""
    if "discontinuities" not in evidence_of:
        return ""
    is_discontinuity = evidence_of["discontinuities"]["discontinuity"]
    steps = is_discontinuity["step"].values[is_discontinuity.values]
    if not steps.size:
        return "No discontinuity was found."
    shown = ", ".join(f"{step:,}" for step in steps[:10])
    return (
        f"The speed changes abruptly at {steps.size} steps (discontinuities): {shown}"
        f"{', …' if steps.size > 10 else ''}."
    )


def latest(freezing: xr.Dataset, ds: xr.Dataset, most: int) -> list[dict[str, Any]]:
    """Tokens in the order of their last change, the latest first."""
    last = freezing["last_motion"].values
    order = np.argsort(-last, kind="stable")[:most]
    texts = ds["token_text"].values if "token_text" in ds else None
    dead = ds["is_dead"].values if "is_dead" in ds else None
    count = ds["token_count"].values if "token_count" in ds else None
    return [
        {
            "id": int(ds["token"].values[at]),
            "text": "" if texts is None else str(texts[at]),
            "kind": "" if dead is None else ("dead" if dead[at] else "live"),
            "count": "" if count is None or count[at] < 0 else f"{int(count[at]):,}",
            "last": "never" if last[at] < 0 else f"{int(last[at]):,}",
            "moves": f"{int(freezing['moves'].values[at]):,}",
        }
        for at in order
    ]


Config = Mapping[str, Mapping[str, Any]]

_OF_RESUME = {"training.steps"}
"""Fields that a resume changes; a fork changes the others."""

_IGNORED = ("recording.", "training.device", "training.threads")


def reproduction(name: str, info: Mapping[str, Any]) -> dict[str, str]:
    """The commands that reproduce a run, their configuration file, and a remark.

    Parameters
    ----------
    name : str
        Name of the run.
    info : mapping
        Result of `trajstore.store.reading.run_info.information`.
    """
    config, run = info.get("config") or {}, RunAttributes.of(info)
    # The user's own loop may record any JSON value.
    if not config or not all(isinstance(fields, Mapping) for fields in config.values()):
        return {"commands": "", "settings": "", "made_of": ""}
    origin = "what_if" if run.what_if else "fork" if _has_unlisted_fork(info) else ""
    if origin:
        made_of = (
            "This run begins with rows of another run, so its settings alone do not reproduce it. "
            f"The provenance below names that run and the changed settings as {origin}."
        )
        return {"commands": "", "settings": "", "made_of": made_of}
    text = run.corpus
    option, made_of = "", ""
    if _is_text_file(text):
        option = f" --corpus {shlex.quote(str(text['name']))}"
        made_of = f"The text has {text['bytes']:,} bytes, SHA-256 {text['sha256']}."
    on_cpu = run.provenance.get("device") == "cpu"
    segments = trained_segments(
        info if on_cpu else {**info, "provenance": {}},  # on other devices, threads change no bit
        0,
        (info.get("steps") or {}).get("last") or 1,
    )
    if not all(each.config.keys() >= {"training", "schedule"} for each in segments):
        segments = segments[-1:]
    configs = [_shortened(each) for each in segments[:-1]] + [segments[-1].config]
    threads = [segment.threads for segment in segments]
    made, made_with = "again.zarr", configs[0]
    commands = [f"trajstore record --config run.toml{option}{_threads(threads[0])} -o {made}"]
    for number, segment in enumerate(segments[1:], 1):
        changes = dict(_changes(made_with, configs[number]))
        made_with = _changed(made_with, changes)
        more = _threads(threads[number]) if threads[number] != threads[number - 1] else ""
        if changes.keys() <= _OF_RESUME:
            steps = configs[number]["training"]["steps"]
            commands.append(f"trajstore record --resume --steps {steps}{more} -o {made}")
        else:
            source, made = made, f"again-{number + 1}.zarr"
            settings = "".join(
                f" --set {shlex.quote(f'{field}={json.dumps(value)}')}"
                for field, value in changes.items()
            )
            commands.append(
                f"trajstore fork {source} --at {segment.first}{settings}{more} -o {made}"
            )
    commands.append(f"trajstore compare {shlex.quote(name)} {made}")
    return {"commands": "\n".join(commands), "settings": _toml(configs[0]), "made_of": made_of}


def _has_unlisted_fork(info: Mapping[str, Any]) -> bool:
    """True if a fork changed settings that no segment lists, as in earlier versions."""
    return bool(RunAttributes.of(info).fork.get("settings")) and "segments" not in info


def _shortened(segment: Segment) -> Config:
    """The configuration with the end of training at the end of the segment.

    The decay of the learning rate keeps its end.
    """
    config = {section: dict(fields) for section, fields in segment.config.items()}
    training, schedule = config["training"], config["schedule"]
    if training["steps"] > segment.last:
        schedule["steps"] = schedule.get("steps") or training["steps"]
        training["steps"] = segment.last
    return config


def _changes(before: Config, after: Config) -> Iterator[tuple[str, Any]]:
    """Fields that a command has to set, and their values.

    No command can unset a field, so a given end of the decay stays given.
    """
    for section, fields in after.items():
        for field, value in fields.items():
            name = f"{section}.{field}"
            if name == "schedule.steps":
                kept = before[section].get(field) or after["training"]["steps"]
                if kept != _decay_end(after):
                    yield name, _decay_end(after)
            elif not name.startswith(_IGNORED) and value != before.get(section, {}).get(field):
                yield name, value


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    changed = {section: dict(fields) for section, fields in config.items()}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        changed[section][field] = value
    return changed


def _decay_end(config: Config) -> Any:
    return config["schedule"].get("steps") or config["training"]["steps"]


def _threads(number: int | None) -> str:
    return "" if number is None else f" --threads {number}"


def _toml(config: Config) -> str:
    lines = []
    for section, fields in config.items():
        known = {key: value for key, value in fields.items() if value is not None}
        lines += [
            f"[{section}]",
            *(f"{key} = {json.dumps(each)}" for key, each in known.items()),
            "",
        ]
    return "\n".join(lines)


def _is_text_file(text: Any) -> TypeGuard[Mapping[str, Any]]:
    """True if the provenance describes a text from outside the program."""
    known = isinstance(text, Mapping) and text.keys() >= {"name", "bytes", "sha256"}
    return known and isinstance(text["bytes"], int) and "(embedded)" not in str(text["name"])
