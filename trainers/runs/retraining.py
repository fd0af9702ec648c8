"""A step of a recorded run, reached by training again.

Every row on the way is compared with the recorded one, all its variables, bit for bit: what is
reached is proven to be the state that the run had, and it may go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trajstore.errors import NothingToResume
from trajstore.store.metadata.stretches import trained_stretches
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.compared_run import Comparison, RowDifference
from trajstore.trainers.recording.provenance import changed_provenance
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.recording.torch_threads import torch_threads
from trajstore.trainers.runs.checkpoint import Checkpoint, CheckpointFolder
from trajstore.trainers.runs.recorded_rates import check_rates
from trajstore.trainers.runs.recorded_training import recording_options, run_recorded
from trajstore.trainers.runs.resume_checks import recorded_config
from trajstore.trainers.runs.training_setup import Training, build_training, find_device
from trajstore.trainers.runs.training_state import take_state
from trajstore.trainers.texts.corpus import Corpus

__all__ = ["Retrained", "explain_difference", "retrain_to_last_row", "train_again"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Retrained:
    """Where training again has led.

    Attributes
    ----------
    checkpoint : Checkpoint or None
        Of the step that was to be reached; None if a row before it differed, and nobody took the
        rows from there on.
    difference : RowDifference or None
        The first row that is not the recorded one.
    """

    checkpoint: Checkpoint | None
    difference: RowDifference | None


def train_again(
    run: Location,
    text: Corpus,
    taken: Checkpoint | None,
    step: int,
    *,
    sources: Mapping[str, str],
    make_writer: Callable[[int], RunWriter] | None = None,
    on_retrain: Progress | None = None,
) -> Retrained:
    """Train a run's steps again until one of them. The run is only read.

    Each stretch is trained with its own configuration, and on the CPU with its number of threads.

    Parameters
    ----------
    run : Path or RemotePath
    text : Corpus
        Of the run.
    taken : Checkpoint or None
        Of the run, at an earlier step, to begin from; None for its start.
    step : int
        That is to be reached, which has a row; 1 or more.
    sources : mapping of str to str
        Paths of the text and the tokenizer, where they were given.
    make_writer : callable, optional
        Called with the number of the first row that differs, makes the writer that takes that row
        and those after it. Without it, training stops there.
    on_retrain : callable, optional
        Called after every step with it, and with the one that is to be reached.

    Raises
    ------
    ConfigError
        If the device of the configuration is not there.
    NothingToResume
        If the recorded learning rates are not those of the configurations; nothing is trained then.
    """
    attributes = open_group(run).attrs.asdict()
    stretches = trained_stretches(attributes, 0 if taken is None else taken.step, step)
    check_rates(run, stretches)
    comparison = Comparison(make_writer)
    reached = taken
    try:
        for stretch in stretches:
            with torch_threads(stretch.threads):
                reached = _train_stretch(
                    run,
                    build_training(RunConfig.parse(stretch.config), text),
                    text,
                    reached,
                    stretch.last,
                    comparison=comparison,
                    created=str(attributes["created"]),
                    sources=sources,
                    on_step=lambda now: on_retrain(now, step) if on_retrain else None,
                )
            if reached is None:
                break
    finally:
        comparison.close()
    return Retrained(checkpoint=reached, difference=comparison.difference)


def _train_stretch(
    run: Location,
    training: Training,
    text: Corpus,
    taken: Checkpoint | None,
    last: int,
    *,
    comparison: Comparison,
    created: str,
    sources: Mapping[str, str],
    on_step: Callable[[int], None],
) -> Checkpoint | None:
    """Checkpoint of the last step of a stretch; None if the rows from a difference on are lost."""
    config = training.config
    reached: list[Checkpoint] = []

    def after_step(recorder: Recorder, scaler: Any) -> bool:
        on_step(recorder.step)
        if comparison.difference is not None and comparison.successor is None:
            return True  # the rows from there on are nowhere
        if recorder.step < last:
            return False
        state, tensors = take_state(training, scaler)
        reached.append(
            Checkpoint(
                run=created,
                name=run.name,
                step=last,
                rows=recorder.rows,
                config=config.model_dump(mode="json"),
                sources=dict(sources),
                state=state,
                tensors=tensors,
            )
        )
        return True

    options = recording_options(config, text, overwrite=False, resume=True)
    run_recorded(training, run, options, taken, after_step=after_step, comparison=comparison)
    return reached[0] if reached else None


def retrain_to_last_row(
    run: Location,
    text: Corpus,
    *,
    sources: Mapping[str, str],
    fsync: bool = True,
    on_retrain: Progress | None = None,
) -> Checkpoint:
    """Checkpoint of the last row of a run that has none, by training all its steps again.

    It is kept beside the run, so that this need not be done twice.

    Raises
    ------
    NothingToResume
        If a row is not the recorded one; the run is as it was.
    RunLocked
        If another process writes to the run.
    """
    with RunLock.acquire(run):
        arrays: Any = open_group(run)
        rows = int(arrays.attrs["committed_rows"])
        step = int(arrays["step"][rows - 1])
        reached = train_again(run, text, None, step, sources=sources, on_retrain=on_retrain)
        if reached.difference is not None:
            reason = explain_difference(run, reached.difference)
            raise NothingToResume(
                f"{run} has no checkpoint, and trained again it is not what was recorded: "
                f"{reason}; the run is as it was, and can be gone on with only where it was "
                "recorded"
            )
        assert reached.checkpoint is not None
        CheckpointFolder(run, fsync=fsync).add(reached.checkpoint, rows)
    return reached.checkpoint


def explain_difference(run: Location, difference: RowDifference) -> str:
    """Where a training that is done again first differs, and what may be why."""
    attributes: dict[str, Any] = open_group(run).attrs.asdict()
    provenance = attributes.get("provenance", {})
    config = recorded_config(run)
    where = f"at step {difference.step} {' and '.join(_first(difference.variables))}"
    where += " differ" if len(difference.variables) > 1 else " differs"
    if "lr" in difference.variables:
        return (
            f"{where}, because the learning rate was not then what its configuration now says; "
            "it went on later with another schedule"
        )
    changed = changed_provenance(provenance, find_device(config.training.device))
    changed.pop("threads", None)  # the recorded number is used
    changes = [
        f"{name} is {now} now and was {provenance.get(name)}" for name, now in changed.items()
    ]
    for entry in provenance.get("resumed", []):
        changes += [
            f"{name} was {value} from step {entry['step'] + 1} on"
            for name, value in entry.items()
            if name not in ("step", "time", "threads")
        ]
    reason = ", ".join(changes) or "versions, machine and number of threads are the same as then"
    return f"{where} ({reason})"


def _first(variables: tuple[str, ...]) -> list[str]:
    """The first variables, and how many more there are."""
    shown = list(variables[:2])
    if len(variables) > 2:
        shown = [", ".join(shown), f"{len(variables) - 2} more"]
    return shown
