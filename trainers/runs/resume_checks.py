"""What a run goes on from, and what may not change when it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trajstore.errors import ConfigError, CorpusError, NothingToResume, RunNotFound
from trajstore.store.metadata.object_keys import checkpoint_folder
from trajstore.store.metadata.stretches import listed_stretches
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.trainers.config import MAY_CHANGE, RunConfig
from trajstore.trainers.recording.provenance import changed_provenance
from trajstore.trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trajstore.trainers.runs.optimizer import learning_rate
from trajstore.trainers.runs.training_setup import find_device
from trajstore.trainers.texts.corpus import Corpus

__all__ = [
    "ResumePoint",
    "check_device",
    "check_recorded",
    "check_text",
    "decay_note",
    "find_resume_point",
    "recorded_config",
    "resume_notes",
]


def recorded_config(path: RunPath, *, after: int | None = None) -> RunConfig:
    """Configuration that a run was recorded with.

    Parameters
    ----------
    path : path-like
    after : int, optional
        Step after which it held, for a run that was extended or forked; without it, the last step.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If it was not recorded from a configuration.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=2", "training.batch_size=4"])
    >>> recorded_config(record(config, "run.zarr")) == config
    True
    """
    attributes = _attributes(location(path))
    config = attributes.get("config")
    if not config:
        raise NothingToResume(
            f"{path} was not recorded by `trajstore record`, so it does not say how to go on; "
            "whoever recorded it can, with resume=True"
        )
    if after is not None:
        listed = listed_stretches(attributes)
        config = [entry["config"] for entry in listed if entry["step"] <= max(after, 0)][-1]
    return RunConfig.parse(config)


@dataclass(frozen=True, kw_only=True, eq=False)
class ResumePoint:
    """How far a run has come that is to go on.

    Attributes
    ----------
    rows : int
        That are committed.
    last_step : int
        Of the last of them; 0 without any.
    complete : bool
        Whether it was closed as complete.
    taken : Checkpoint or None
        The newest one that it can go on from.
    """

    rows: int
    last_step: int
    complete: bool
    taken: Checkpoint | None

    def has_all(self, steps: int) -> bool:
        """Whether no step is left to be trained."""
        if not self.rows or self.last_step < steps:
            return False
        return self.complete or self.taken is None or self.taken.step >= steps


def find_resume_point(path: Location, config: RunConfig) -> ResumePoint:
    """How far a run has come.

    Parameters
    ----------
    path : Path or RemotePath
        Of the run.
    config : RunConfig
        That it is to go on with.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If it can not go on, or has come further than is wanted.
    ConfigError
        If the configuration has changed where it may not; the message names the field.
    RunLocked
        If another process writes to the run.
    FormatError
        If the checkpoint is damaged.
    """
    recorded = recorded_config(path)
    with RunLock.acquire(path):
        attributes = _attributes(path)
        check_recorded(path, attributes)
        _check_config(path, recorded, config, attributes.get("provenance", {}))
        rows = attributes.get("committed_rows", 0)
        taken = CheckpointFolder(path).newest(str(attributes.get("created")), rows)
        arrays: Any = open_group(path)
        last = int(arrays["step"][rows - 1]) if rows else 0
    wanted = config.training.steps
    if wanted < last:
        raise NothingToResume(
            f"{path} has come to step {last}, and {wanted} are wanted; to extend it, give more: "
            f"--resume --steps {2 * last}"
        )
    fork = attributes.get("provenance", {}).get("fork")
    if fork and rows and taken is None and wanted > last:
        raise NothingToResume(
            f"{path} is a fork of {fork.get('run')} at step {fork.get('step')} and has no "
            f"checkpoint in {checkpoint_folder(path).name}; fork that run again"
        )
    return ResumePoint(
        rows=rows, last_step=last, complete=attributes["status"] == "complete", taken=taken
    )


def check_recorded(path: Location, attributes: dict[str, Any]) -> None:
    """Insist that a run is of a training that can be done again.

    Raises
    ------
    NothingToResume
        If it was imported, or computed from another run.
    """
    if attributes.get("imported"):
        raise NothingToResume(
            f"{path} was imported, so there is no training to go on with; record it with "
            "`trajstore record`"
        )
    if attributes.get("provenance", {}).get("what_if"):
        raise NothingToResume(
            f"{path} was made by `trajstore what-if` from the gradients of another run, so there "
            "is no training to go on with; fork that run instead (`trajstore record --fork`)"
        )


def check_text(path: Location, text: Corpus) -> None:
    """Insist on the text and the tokenizer of a run.

    Raises
    ------
    CorpusError
        If either is another one.
    """
    before = _attributes(path).get("provenance", {})
    corpus = before.get("corpus", {})
    if corpus.get("sha256") != text.sha256:
        raise CorpusError(
            f"the corpus {text.name} (sha256 {text.sha256[:12]}…) is not that of {path}, "
            f"{corpus.get('name')} of {corpus.get('bytes')} bytes (sha256 "
            f"{str(corpus.get('sha256'))[:12]}…); give that one with --corpus"
        )
    tokenizer = before.get("tokenizer", {})
    if _identity(tokenizer) != _identity(text.tokenizer):
        raise CorpusError(
            f"the tokenizer {_shown(text.tokenizer)} is not that of {path}, {_shown(tokenizer)}; "
            "give that one with --tokenizer"
        )


def resume_notes(path: Location, config: RunConfig, taken: Checkpoint) -> list[str]:
    """What should be known about a run that goes on: where it is not as if never interrupted."""
    found = []
    before = _attributes(path).get("provenance", {})
    for name, now in changed_provenance(before, find_device(config.training.device)).items():
        found.append(
            f"{name} is {now} now and was {before.get(name)}, so the bits may differ from those of "
            "a run that was never interrupted"
        )
    moved = decay_note(RunConfig.parse(taken.config), config, taken.step)
    ended = _ended_note(config, taken.step)
    return [*found, *(note for note in (moved, ended) if note)]


def decay_note(old: RunConfig, new: RunConfig, step: int) -> str | None:
    """What should be known of the learning rate after a step, if its decay ends elsewhere now."""
    if new.schedule.name == "constant" or old.decay_steps == new.decay_steps:
        return None
    return (
        f"the decay of the learning rate ends at step {new.decay_steps} now and not at "
        f"{old.decay_steps}, so the rate jumps at step {step + 1}, from "
        f"{learning_rate(old)(step):.6g} to {learning_rate(new)(step):.6g}; to keep the old "
        f"decay give --set schedule.steps={old.decay_steps}, and for one decay without a seam "
        f"record the first part with --set schedule.steps={new.decay_steps}"
    )


def _ended_note(config: RunConfig, step: int) -> str | None:
    """What should be known of a run whose learning rate is 0 before its last step."""
    end, steps = config.decay_steps, config.training.steps
    if config.schedule.name == "constant" or end >= steps or learning_rate(config)(end) != 0:
        return None
    return (
        f"the decay of the learning rate ends at step {end} (schedule.steps), so the rate is 0 in "
        f"steps {max(end, step) + 1} to {steps}; for a rate that goes on, fork the run at a step "
        f"before with another schedule.steps (--fork RUN --at STEP --set schedule.steps={steps})"
    )


def _attributes(path: Location) -> dict[str, Any]:
    if not path.exists():
        raise RunNotFound(
            f"there is no run at {path} to go on with; to begin one, name a preset "
            "(--preset gatsby) or a file (--config FILE)"
        )
    return open_group(path).attrs.asdict()


def _check_config(
    path: Location, recorded: RunConfig, config: RunConfig, provenance: dict[str, Any]
) -> None:
    before, now = recorded.flat(), config.flat()
    for field, value in now.items():
        if value == before[field] or field in MAY_CHANGE or field == "training.device":
            continue
        if field == "schedule.steps" and recorded.decay_steps == config.decay_steps:
            continue
        raise ConfigError(
            f"{field} is {_toml(before[field])} in {path} and {_toml(value)} now; a run that goes "
            f"on keeps it, so leave it out, or record another run"
        )
    check_device(path, config, provenance)


def check_device(path: Location, config: RunConfig, provenance: dict[str, Any]) -> None:
    """Insist that a configuration means the kind of device that a run was recorded on.

    Raises
    ------
    ConfigError
        If it means another.
    """
    device = find_device(config.training.device)
    used = str(provenance.get("device")).partition(":")[0]
    if device.type != used:
        raise ConfigError(
            f"training.device = {config.training.device!r} is {device.type} here, and {path} was "
            f"recorded on {used}; a run that goes on stays there: --device {used}"
        )


def _toml(value: Any) -> str:
    return "not set" if value is None else str(value)


def _identity(tokenizer: dict[str, str]) -> str | None:
    return tokenizer.get("sha256") or tokenizer.get("name")


def _shown(tokenizer: dict[str, str]) -> str:
    hashed = tokenizer.get("sha256")
    return f"{tokenizer.get('name')}" + (f" (sha256 {hashed[:12]}…)" if hashed else "")
