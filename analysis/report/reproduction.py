"""The commands that reproduce a run, from the configuration of each of its segments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from trajstore.store.metadata.metadata_form import Segment, trained_segments

Config = Mapping[str, Mapping[str, Any]]

_OF_RESUME = {"training.steps"}
"""Fields that a resume changes; a fork changes the others."""

_IGNORED = ("recording.", "training.device")


def reproduction(name: str, info: Mapping[str, Any]) -> dict[str, str]:
    """The commands that reproduce a run, their configuration file, and a remark.

    Parameters
    ----------
    name : str
        Name of the run.
    info : mapping
        Result of `trajstore.store.reading.run_info.information`.
    """
    config, provenance = info.get("config") or {}, info.get("provenance") or {}
    # The user's own loop may record any JSON value.
    if not config or not all(isinstance(fields, Mapping) for fields in config.values()):
        return {"commands": "", "settings": "", "made_of": ""}
    origin = "what_if" if provenance.get("what_if") else "fork" if _has_unlisted_fork(info) else ""
    if origin:
        made_of = (
            "This run begins with rows of another run, so its settings alone do not reproduce it. "
            f"The provenance below names that run and the changed settings as {origin}."
        )
        return {"commands": "", "settings": "", "made_of": made_of}
    text = provenance.get("corpus")
    option, made_of = "", ""
    if _is_text_file(text):
        option = f" --corpus {shlex.quote(str(text['name']))}"
        made_of = f"The text has {text['bytes']:,} bytes, SHA-256 {text['sha256']}."
    on_cpu = provenance.get("device") == "cpu"
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
    fork = (info.get("provenance") or {}).get("fork") or {}
    return bool(fork.get("settings")) and "segments" not in info


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
    found = {section: dict(fields) for section, fields in config.items()}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        found[section][field] = value
    return found


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
