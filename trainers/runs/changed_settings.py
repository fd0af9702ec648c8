"""What may change when a run is continued: the checks and notes of a resume and of a fork.

`find_resume_point` finds where a run resumes. A fork may change more fields than a resume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajstore.errors import ConfigError, CorpusError, InvalidArgument, NothingToResume, RunNotFound
from trajstore.exchange.export_run import holds_exactly
from trajstore.provenance import RunAttributes
from trajstore.schema import TIERS, VARIABLES
from trajstore.store.metadata.metadata_form import listed_segments
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.trainers.config import MAY_CHANGE, RunConfig
from trajstore.trainers.recording.notes import changed_provenance
from trajstore.trainers.runs.run_plan import existing_runs, native_types, planned_runs, shared_path
from trajstore.trainers.runs.training_setup import find_device, learning_rate
from trajstore.trainers.states.state import State
from trajstore.trainers.states.states import States
from trajstore.trainers.texts import Corpus
from trajstore.values.optimizer_rule import MOMENTS


def recorded_config(path: RunPath, *, after: int | None = None) -> RunConfig:
    """Return the configuration that a run was recorded with.

    Parameters
    ----------
    path : path-like
    after : int, optional
        For a run that was extended or forked: return the configuration after this step. Default:
        the last step.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If the run was not recorded from a configuration.

    Examples
    --------
    >>> recorded_config("everything.zarr").training.steps
    3
    """
    runs = existing_runs(path)
    attributes = _attributes(runs[0] if runs else location(path))
    config = attributes.get("config")
    if not config:
        raise NothingToResume(
            f"{path} was not recorded by `trajstore record`, so it has no configuration; only the "
            "program that recorded it can resume it, or restore() a step and continue there in a "
            "new run; what_if() applies its gradients with other settings"
        )
    if after is not None:
        listed = listed_segments(attributes)
        config = [entry["config"] for entry in listed if entry["step"] <= max(after, 0)][-1]
    return RunConfig.parse(config)


@dataclass(frozen=True, kw_only=True, eq=False)
class ResumePoint:
    """State of a run to resume, or of all runs of its training together.

    Attributes
    ----------
    runs : sequence of Path or RemotePath
        Their paths; the first run has the checkpoints.
    last_step : int
        Step of the last row; 0 without rows.
    complete : bool
        True if every run was closed as complete.
    state : State or None
        The newest one, without which the training is repeated from its start. A complete run that
        is not extended needs none.
    """

    runs: Sequence[Location]
    last_step: int
    complete: bool
    state: State | None

    @property
    def has_steps(self) -> bool:
        """True if the run can resume after a trained step."""
        return self.last_step > 0 or self.state is not None

    def has_all(self, steps: int) -> bool:
        """Return True if all steps have been trained."""
        return self.last_step >= steps and (
            self.complete or self.state is None or self.state.step >= steps
        )


def find_resume_point(runs: Sequence[Location], config: RunConfig) -> ResumePoint:
    """Return the state of a training to resume.

    Parameters
    ----------
    runs : sequence of Path or RemotePath
        Paths of its existing runs.
    config : RunConfig
        Configuration of the resumed run.

    Raises
    ------
    RunNotFound
        If there is no run.
    NothingToResume
        If the run cannot be resumed, has more steps than the configuration, or another run of the
        training is missing.
    ConfigError
        If a fixed field of the configuration has changed; the message names the field.
    RunLocked
        If another process writes to the run.
    FormatError
        If the checkpoint is damaged.
    """
    path = runs[0]
    recorded = recorded_config(path)
    with contextlib.ExitStack() as locks:
        for run in runs:
            locks.enter_context(RunLock.acquire(run))
        of_each = [_attributes(run) for run in runs]
        attributes = of_each[0]
        check_recorded(path, attributes)
        _check_config(path, recorded, config, RunAttributes.of(attributes).provenance)
        rows = min(each.get("committed_rows", 0) for each in of_each)
        missing = set(planned_runs(shared_path(path, config), config)).difference(runs)
        if missing and rows:
            raise NothingToResume(
                f"{missing.pop()} is missing, the other run of the training of {path}; restore it, "
                "or record another training"
            )
        states, steps = States(path, rows), config.training.steps
        last = states.steps[-1] if rows else 0
        if steps < last:
            raise NothingToResume(
                f"{path} has {last} steps already, got training.steps={steps}; to extend it, use "
                f"resume=True and training.steps={2 * last}"
            )
        complete = all(each["status"] == "complete" for each in of_each)
        state = None if complete and steps == last else states.before()
    return ResumePoint(runs=runs, last_step=last, complete=complete, state=state)


def check_recorded(path: Location, attributes: dict[str, Any]) -> None:
    """Check that a run comes from a training run that can be repeated.

    Raises
    ------
    NothingToResume
        If the run was imported, or computed from another run.
    """
    if attributes.get("imported"):
        raise NothingToResume(
            f"{path} was imported, so it has no training to resume; record a run with "
            "`trajstore record`"
        )
    if RunAttributes.of(attributes).what_if:
        raise NothingToResume(
            f"{path} was computed by `trajstore what-if` from the gradients of another run, so it "
            "has no training to resume; fork the other run (`trajstore fork`)"
        )


def check_text(path: Location, text: Corpus) -> None:
    """Check that the text and the tokenizer are those of a run.

    Raises
    ------
    CorpusError
        If the text or the tokenizer differs.
    """
    before = RunAttributes.of(_attributes(path))
    corpus, tokenizer = before.corpus, before.tokenizer
    if corpus.get("sha256") != text.sha256:
        raise CorpusError(
            f"the corpus {text.name} (sha256 {text.sha256[:12]}…) differs from that of {path}, "
            f"{corpus.get('name')} of {corpus.get('bytes')} bytes (sha256 "
            f"{str(corpus.get('sha256'))[:12]}…); give the recorded one: corpus=…"
        )
    if _identity(tokenizer) != _identity(text.tokenizer):
        raise CorpusError(
            f"the tokenizer {_shown(text.tokenizer)} differs from that of {path}, "
            f"{_shown(tokenizer)}; give the recorded one: tokenizer=…"
        )


def resume_notes(path: Location, config: RunConfig, state: State) -> list[str]:
    """Return notes about differences between a resumed run and an uninterrupted one."""
    notes = []
    before = RunAttributes.of(_attributes(path)).provenance
    for name, now in changed_provenance(before, find_device(config.training.device)).items():
        notes.append(
            f"{name} was {before.get(name)} and is now {now}, so the bits may differ from those of "
            "an uninterrupted run"
        )
    moved = decay_note(RunConfig.parse(dict(state.config)), config, state.step)
    ended = _ended_note(config, state.step)
    return [*notes, *(note for note in (moved, ended) if note)]


def decay_note(old: RunConfig, new: RunConfig, step: int) -> str | None:
    """Return a note if the decay of the learning rate ends at another step than before."""
    if new.schedule.name == "constant" or old.decay_steps == new.decay_steps:
        return None
    return (
        f"the decay of the learning rate now ends at step {new.decay_steps} instead of "
        f"{old.decay_steps}, so the rate jumps at step {step + 1}, from "
        f"{learning_rate(old)(step):.6g} to {learning_rate(new)(step):.6g}; to keep the old "
        f"decay, give schedule.steps={old.decay_steps}; for one decay without a jump, record the "
        f"first part with schedule.steps={new.decay_steps}"
    )


def _ended_note(config: RunConfig, step: int) -> str | None:
    """Return a note if the learning rate is 0 before the last step."""
    end, steps = config.decay_steps, config.training.steps
    if config.schedule.name == "constant" or end >= steps or learning_rate(config)(end) != 0:
        return None
    return (
        f"the decay of the learning rate ends at step {end} (schedule.steps), so the rate is 0 in "
        f"steps {max(end, step) + 1} to {steps}; for a rate above 0, fork the run at an earlier "
        f"step with another schedule.steps (trajstore fork RUN --at STEP --set "
        f"schedule.steps={steps} -o FORK)"
    )


def _attributes(path: Location) -> dict[str, Any]:
    if not path.exists():
        raise RunNotFound(
            f"there is no run at {path} to resume; to start one, name a preset (--preset gatsby) "
            "or a file (--config FILE)"
        )
    return root_attributes(path)


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
            f"{field} is {_toml(before[field])} in {path}, got {_toml(value)}; a resumed run keeps "
            "it, so leave it out, or record another run"
        )
    check_device(path, config, provenance)


def check_device(path: Location, config: RunConfig, provenance: dict[str, Any]) -> None:
    """Check that a configuration selects the kind of device that recorded a run.

    Raises
    ------
    ConfigError
        If it selects another one.
    """
    device = find_device(config.training.device)
    used = str(provenance.get("device")).partition(":")[0]
    if device.type != used:
        raise ConfigError(
            f"training.device = {config.training.device!r} is {device.type} here, but {path} was "
            f"recorded on {used}; give training.device={used}"
        )


def _toml(value: Any) -> str:
    return "not set" if value is None else str(value)


def _identity(tokenizer: dict[str, str]) -> str | None:
    return tokenizer.get("sha256") or tokenizer.get("name")


def _shown(tokenizer: dict[str, str]) -> str:
    hashed = tokenizer.get("sha256")
    return f"{tokenizer.get('name')}" + (f" (sha256 {hashed[:12]}…)" if hashed else "")


_SECTIONS = ("optimizer", "schedule")
_FIELDS = (
    "training.steps",
    "training.max_grad_norm",
    "training.autocast",
    "training.device",
    "training.threads",
    "model.dtype",
    "recording.memory",
    "recording.commit_every",
    "recording.checkpoint_every",
)


def forked_config(recorded: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of a fork.

    Parameters
    ----------
    recorded : RunConfig
        Configuration of the run to fork.
    settings : sequence of str
        ``section.field=value``.

    Raises
    ------
    ConfigError
        If a field is unknown, a value is impossible, or the field must not change; the message
        lists the fields that may.
    """
    config = recorded.with_values(settings)
    for field in changed_fields(recorded, config):
        if field.partition(".")[0] not in _SECTIONS and field not in _FIELDS:
            raise ConfigError(
                f"{field} cannot change at a fork; fields that may change: "
                f"{', '.join(f'{section}.*' for section in _SECTIONS)}, {', '.join(_FIELDS)}"
            )
    scaled = {recorded.training.autocast, config.training.autocast}
    if len(scaled) > 1 and "float16" in scaled:
        raise ConfigError(
            f"training.autocast = {config.training.autocast!r}: the run was recorded with "
            f"{recorded.training.autocast!r}, and a fork can neither add nor remove a gradient "
            "scaler; only none and bfloat16 are interchangeable"
        )
    return config


def changed_fields(recorded: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the changed fields with their new values."""
    before = recorded.flat()
    return {field: value for field, value in config.flat().items() if value != before[field]}


def keeps_state(recorded: RunConfig, config: RunConfig) -> bool:
    """Return True if the optimizer of the fork can use the state."""
    return (recorded.optimizer.name == "sgd") == (config.optimizer.name == "sgd")


def forked_types(
    types: Mapping[str, str], recorded: RunConfig, config: RunConfig
) -> dict[str, str]:
    """Return the native type of each variable of a fork.

    Parameters
    ----------
    types : mapping of str to str
        Native type of each variable of the run to fork.
    recorded, config : RunConfig
        Configurations of that run and of the fork.

    Raises
    ------
    ConfigError
        If the new type of a variable cannot represent its recorded values.
    InvalidArgument
        If the fork would lack a variable that the configuration names.
    """
    before, after = native_types(recorded), native_types(config)
    forked = {}
    for name, native in types.items():
        if name not in VARIABLES and not keeps_state(recorded, config):
            continue
        of_other = name == "hyperparameters" and not keeps_state(recorded, config)
        if of_other or (name in MOMENTS and config.optimizer.name == "sgd"):
            if name in set(config.recording.variables) - set(TIERS):
                raise InvalidArgument(
                    f"optimizer.name = {config.optimizer.name!r}: the run records {name} of "
                    f"{recorded.optimizer.name} by name; fork with the same optimizer"
                )
            continue
        of_type = name in ("W_ulp_l1", "params_digest", "step_digest")
        if of_type and config.model.dtype != recorded.model.dtype:
            raise ConfigError(
                f"model.dtype = {config.model.dtype!r}: the run records {name} of weights in "
                f"{recorded.model.dtype}; leave out model.dtype"
            )
        same = before.get(name) == after.get(name)
        forked[name] = native if same else after.get(name, native)
        if not holds_exactly(native, forked[name]):
            raise ConfigError(
                f"{name} would change from {native} to {forked[name]}, which rounds its values; a "
                "fork can only widen types, such as model.dtype=float32"
            )
    return forked


def fork_notes(
    path: Location, attributes: Mapping[str, Any], recorded: RunConfig, config: RunConfig, step: int
) -> list[str]:
    """Return notes about a fork.

    Parameters
    ----------
    path : Path or RemotePath
        The run to fork.
    attributes : mapping
        Its attributes.
    recorded, config : RunConfig
        Its configuration after the step, and that of the fork.
    step : int
        Step of the fork.
    """
    notes = []
    changed = changed_fields(recorded, config)
    if listed_segments(attributes)[-1]["step"] > step and "training.steps" not in changed:
        last = recorded_config(path).training.steps
        notes.append(
            f"step {step} was trained with training.steps={recorded.training.steps}, which the "
            f"fork keeps; {path} was extended later to {last} steps: for as many, give "
            f"training.steps={last}"
        )
    before, after = recorded.optimizer.name, config.optimizer.name
    if not keeps_state(recorded, config):
        notes.append(
            f"{after} cannot use the state of {before}, so it starts without state at step "
            f"{step + 1}" + (", and the fork has no moments" if after == "sgd" else "")
        )
    rescheduled = any(name.startswith("schedule.") for name in changed)
    moved = decay_note(recorded, config, step)
    if "training.steps" in changed and not rescheduled and moved:
        notes.append(moved)
    return notes
