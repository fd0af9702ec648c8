"""Steps between the keyframes of a run of `record`: trained again, compared, and stored.

A step is trained from the keyframe before it, with the configuration of the run. Every variable of
each row has to agree with the recorded row, bit for bit. With the digests, this covers all
parameters, gradients and buffers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from trajstore.arguments import checks_types
from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument, NothingToResume, VariableNotRecorded
from trajstore.exchange.export_run import write_run
from trajstore.exchange.selection import Steps, select, select_part
from trajstore.provenance import RunAttributes
from trajstore.schema import STEP
from trajstore.store.reading.open_group import open_group, root_attributes, whole
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.create import staged_run
from trajstore.store.writing.resumed_run import resumed_run
from trajstore.trainers.recording.existing_run import ComparedRun, Comparison, RowDifference
from trajstore.trainers.runs.differences import explain_difference
from trajstore.trainers.states.stored_model import StoredModel
from trajstore.trainers.texts import load_corpus


@dataclass(frozen=True, kw_only=True)
class Developed:
    """Developed steps.

    Attributes
    ----------
    steps : int
        Number of steps that were stored or reached.
    keyframe : int
        Step of the keyframe that they were trained from.
    difference : str or None
        The first difference from the recorded steps; None if all agree.
    """

    steps: int
    keyframe: int
    difference: str | None


@checks_types
def develop_run(
    run: RunPath,
    output: str | os.PathLike[str],
    *,
    steps: Steps,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    allow_different: bool = False,
    overwrite: bool = False,
    on_retrain: Callable[[int, int], None] | None = None,
) -> Developed:
    """Develop steps of a run with keyframes, as a new run of the tier ``everything``.

    They are trained from the keyframe before them, and compared with the recorded rows.

    Parameters
    ----------
    run : path-like or str
        A run of `trainers.record`, with ``variables="keyframes"``.
    output : path-like
        Path of the new run, by custom ``NAME.zarr``.
    steps : str, int, slice or iterable of int
        Consecutive steps, such as ``"4300:4400"``.
    corpus, tokenizer : path-like, optional
        As for `trainers.record`; default: the paths that the run was recorded with.
    allow_different : bool
        Store the steps also if they differ. The new run tells the first difference, in its
        attribute ``provenance.developed``.
    overwrite : bool
        Replace an existing run.
    on_retrain : callable, optional
        Called after every step with the step and the last one.

    Returns
    -------
    Developed

    Raises
    ------
    RunNotFound, StepNotFound, RunExists
        If there is no run, or it lacks the step; or if `output` exists.
    VariableNotRecorded
        If the run has no keyframes, or none before the steps.
    InvalidArgument
        If it was recorded from an own loop (use `trainers.develop`), or the steps have gaps.
    NothingToResume
        If a developed step differs. The message has the step, the parameters, and what differs
        between the machines.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=3", "training.batch_size=4",
    ...     "recording.variables=keyframes", "recording.keyframe_every=2"])
    >>> path = record(config, "run.zarr")
    >>> develop_run(path, "part.zarr", steps="1:3").difference
    >>> from trajstore import open_run
    >>> open_run("part.zarr").params_grad.step.values
    array([1, 2])
    """
    # They need transformers, which `rows_of` of an own loop does without.
    from trajstore.trainers.runs.changed_settings import check_text, recorded_config
    from trajstore.trainers.runs.record import text_sources
    from trajstore.trainers.runs.walk import walk
    from trajstore.trainers.states.states import States

    place = location(run)
    if location(output).absolute() == place.absolute():
        raise InvalidArgument(f"{output} is the run to develop; choose another path")
    group: Any = open_group(place)
    attributes: dict[str, Any] = group.attrs.asdict()
    _check_developable(run, attributes)
    recorded = np.asarray(group[STEP.name][...])
    chosen = select_part(xr.Dataset(coords={STEP.name: recorded}), steps=steps)[STEP.name].values
    first, last = int(chosen[0]), int(chosen[-1])
    if len(chosen) != last - first + 1:
        raise InvalidArgument(
            f"steps: got {len(chosen)} steps from {first} to {last}, expected consecutive steps; "
            "develop them together, and select some of the new run"
        )
    begin = max(first - 1, 0)
    state = States(place).before(begin)
    keyframe = 0 if state is None else state.step
    sources = text_sources(state, attributes, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(recorded_config(place), **sources)
    check_text(place, text)
    compared = Comparison(goes_on=allow_different)
    show = None if on_retrain is None else lambda step, _: on_retrain(step, last)
    train = partial(walk, place, text, compared=compared, sources=sources, on_step=show)
    with staged_run(output, overwrite=overwrite) as new:
        if begin > keyframe:
            state = train(state, begin)
        part, difference = new.with_name("developed.zarr"), compared.difference
        if difference is None or allow_different:
            train(state, step_to_reach(place, begin, last), part=part)
        told = write_developed(
            place,
            new,
            part,
            range(first, last + 1),
            keyframe,
            difference,
            allow_different=allow_different,
        )
    return Developed(steps=len(chosen), keyframe=keyframe, difference=told)


def _check_developable(run: RunPath, attributes: dict[str, Any]) -> None:
    if not RunAttributes.of(attributes).keyframe_every:
        raise VariableNotRecorded(
            f"{run} has no keyframes, so no steps can be developed; record it with "
            "variables='keyframes'"
        )
    if not attributes.get("config"):
        raise InvalidArgument(
            f"{run} was not recorded by `trajstore record`; develop its steps with your own loop: "
            "trajstore.trainers.develop(run, model, optimizer, step, at=STEP)"
        )


def step_to_reach(run: Location, begin: int, last: int) -> int:
    """Return the last step to train after `begin`: a run begins when an optimizer takes a step.

    So it is later than the last wanted one, if a gradient scaler skipped all steps until there.
    """
    group: Any = open_group(run)
    steps = whole(run, group, STEP.name)
    taken = steps[(group["skipped"][:] != 1) if "skipped" in group else slice(None)]
    return int(max(last, *taken[taken > begin][:1], begin + 1))


def write_developed(
    run: Location,
    new: Path,
    part: Path,
    steps: range,
    keyframe: int,
    difference: RowDifference | None = None,
    *,
    device: torch.device | None = None,
    allow_different: bool = False,
) -> str | None:
    """Compare trained steps with the run, and write them as a new one.

    Parameters
    ----------
    run : Path or RemotePath
    new : Path
        The run to write.
    part : Path
        Run with the trained steps.
    steps : range
        The steps to write.
    keyframe : int
        Step of the keyframe that they were trained from.
    difference : RowDifference, optional
        A difference before these steps.
    device : torch.device, optional
        As for `explain_difference`.
    allow_different : bool
        As for `develop_run`.

    Returns
    -------
    str or None
        The first difference.

    Raises
    ------
    NothingToResume
        If there is one, and they are not allowed.
    """
    attributes = root_attributes(run)
    memory = attribute(attributes, "config", "recording", "memory") or EXCHANGE_MEMORY
    if difference is None:
        difference = _first_difference(run, part, steps, memory)
    told = None if difference is None else explain_difference(run, difference, device)
    if told is not None and not allow_different:
        remedy = (
            "develop them on the machine and with the versions that recorded the run, or give "
            "allow_different=True"
            if device is None
            else "check that the function of `developed` builds the model in training mode, and "
            "that its step does what the loop did"
        )
        raise NothingToResume(
            f"the developed steps of {run} differ from the recorded ones: {told}; " + remedy
        )
    tiled = open_tiled(part)
    entry = {"run": str(run), "created": attributes.get("created"), "keyframe": keyframe,
             "difference": told}  # fmt: skip
    origin = {**RunAttributes.of(tiled.attributes).provenance, "developed": entry}
    tiled = replace(tiled, attributes={**tiled.attributes, "provenance": origin})
    selection = select(tiled, steps=slice(steps.start, steps.stop))
    write_run(new, selection, block_rows=None, memory=memory, on_note=lambda note: None)
    return told


def _first_difference(
    run: Location, part: Path, chosen: range, memory: int | str
) -> RowDifference | None:
    """Return the first row of a part whose values are not those of the run."""
    stored, made = resumed_run(run, None, memory=memory), StoredModel(part)
    steps = whole(run, open_group(run), STEP.name).tolist()
    names = [name for name in stored.arrays if name in made and name != STEP.name]
    comparison = Comparison(variables=names)
    compared = ComparedRun(stored, steps, steps.index(chosen[0]), comparison)
    places = compared.next_rows(1)
    for step, row in made.rows(chosen, names):
        for name, bits in row.items():
            places[name][0] = bits
        compared.commit_row(step)
    return comparison.difference


@contextmanager
def rows_of(run: RunPath, steps: Sequence[int]) -> Iterator[RunPath]:
    """Yield a run whose rows hold the whole state after steps: `run`, or a temporary one.

    Steps between the keyframes of a run of `record` are developed. For other runs, `run` is
    returned, which has an error for such a step.
    """
    stored = StoredModel(run)
    is_recorded = np.isin(steps, stored.all_steps).all() and stored.attributes.get("config")
    if not is_recorded or np.isin(steps, stored.steps).all():
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="trajstore-") as folder:
        part = Path(folder) / "developed.zarr"
        develop_run(run, part, steps=slice(min(steps), max(steps) + 1))
        yield part
