"""The plan of one parameter's run, made before the training starts.

Planning does not change the disk. A new run is created when the first step has provided the type of
every variable. An existing run is compared with its plan (see `existing_run`). `LoggedRows` passes
numbers of every n-th row to the tracker of the training.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import exact
from trajstore.errors import InvalidArgument
from trajstore.schema import COORDINATES, KEYFRAMES, POPULATION, STEP
from trajstore.store.metadata.block_plan import Layout
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.new_run import check_encoding
from trajstore.store.writing.resumed_run import TokenShare
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_summaries import ModelParameters
from trajstore.trainers.recording.digests import StepDigests
from trajstore.trainers.recording.kept_state import Entry, state_attribute
from trajstore.trainers.recording.model_state import ModelState
from trajstore.trainers.recording.notes import (
    RunNotes,
    group_attributes,
    optimizer_attributes,
    provenance,
)
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, select_tokens
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    RecordedParameter,
    hyperparameter_names,
)
from trajstore.trainers.recording.step_inputs import StepInputs
from trajstore.units import format_bytes, parse_bytes
from trajstore.values.native_types import widen
from trajstore.values.norms import vector_norm

logger = logging.getLogger(__name__)

Block = Mapping[str, npt.NDArray[Any]]


@dataclass(eq=False)
class LoggedRows:
    """Passes numbers of committed rows to a tracker, in the thread that has written them.

    They are ``trajstore/step``, ``loss``, ``rows`` and ``bytes_on_disk``, and by population
    (``dead`` and ``live``, or ``all`` without labels) ``grad_norm_POPULATION``, the mean L2 norm of
    the tokens' gradients, and ``unchanged_POPULATION``, the fraction of tokens whose vector has the
    bits of the row before. Numbers of variables that the run lacks are left out.

    Parameters
    ----------
    log : callable
        Takes a dict of numbers. Called in a copy of this thread's context, where trackers keep
        their run. After an error it is not called again; the error is logged.
    every : int
        The first row at or after each multiple of so many steps is passed.
    layout : Layout
        Of the run.
    is_dead : ndarray of bool, (token,), optional
        Of the recorded tokens.
    last_step : int
        Step of the last row before the recording, which is not passed; then of the last row.
    prefix : str
        Prefix of the names.
    """

    log: Callable[[dict[str, float]], Any]
    every: int
    layout: Layout
    is_dead: InitVar[npt.NDArray[np.bool_] | None]
    _: KW_ONLY
    last_step: int
    prefix: str

    def __post_init__(self, is_dead: npt.NDArray[np.bool_] | None) -> None:
        self._context = contextvars.copy_context()
        masks = {"all": slice(None)} if is_dead is None else {"dead": is_dead, "live": ~is_dead}
        self._masks: dict[str, Any] = {
            name: mask for name, mask in masks.items() if isinstance(mask, slice) or mask.any()
        }
        self._before: npt.NDArray[Any] | None = None  # bits of W in the last row of the last block
        self._has_failed = False

    def __call__(self, block: Block, first_row: int, bytes_written: int) -> None:
        """Pass the new rows of a block that was committed, as `RunWriter.on_commit`.

        Parameters
        ----------
        block : mapping of str to ndarray, (row, …)
            Native bits of its rows so far.
        first_row : int
            Number of its first row.
        bytes_written : int
            Bytes of the run on disk.
        """
        if self._has_failed:
            return
        try:
            for row, step in enumerate(block[STEP.name].tolist()):
                is_next = step // self.every > self.last_step // self.every
                self.last_step = max(step, self.last_step)
                if is_next:
                    numbers = self._numbers(block, row)
                    numbers |= {"step": step, "rows": first_row + row + 1}
                    numbers["bytes_on_disk"] = bytes_written
                    named = {f"{self.prefix}{name}": number for name, number in numbers.items()}
                    self._context.run(self.log, named)
            if "W" in block and len(block["W"]) == self.layout.block_rows:
                self._before = block["W"][-1].copy()
        except Exception:  # a tracker can raise anything, which must not end the recording
            self._has_failed = True
            logger.exception("log= failed and is not called again; the recording continues")

    def _numbers(self, block: Block, row: int) -> dict[str, float]:
        def values(name: str) -> npt.NDArray[Any]:
            return widen(block[name][row], self.layout.arrays[name].native)

        numbers = {"loss": float(values("loss"))} if "loss" in block else {}
        of_tokens: dict[str, npt.NDArray[Any]] = {}
        if "grad_token_norm" in block:
            of_tokens["grad_norm"] = values("grad_token_norm")
        elif "grad" in block:
            of_tokens["grad_norm"] = vector_norm(values("grad"))
        before = block["W"][row - 1] if row and "W" in block else self._before
        if "W" in block and before is not None:
            of_tokens["unchanged"] = (block["W"][row] == before).all(-1)
        for kind, numbers_of_tokens in of_tokens.items():
            for name, mask in self._masks.items():
                numbers[f"{kind}_{name}"] = float(numbers_of_tokens[mask].mean())
        return numbers


@dataclass(kw_only=True, eq=False)
class Recording:
    """What all parts of a recorder share.

    Attributes
    ----------
    model : Module
        Not wrapped.
    optimizer : JoinedOptimizer
    options : RecordingOptions
    loop : TrainingLoop
    notes : RunNotes
    on_note : callable or None
        Called with advice, and with the reason if W and the moments cannot be computed; logged
        without it.
    summaries : ModelParameters or None
        Given if summaries of all parameters of the model are recorded.
    state : ModelState or None
        Given if the state of the model is recorded.
    inputs : StepInputs or None
        Given if the inputs of each step are recorded.
    digests : StepDigests or None
        Given if digests are recorded.
    """

    model: torch.nn.Module
    optimizer: JoinedOptimizer
    options: RecordingOptions
    loop: TrainingLoop
    notes: RunNotes
    on_note: Callable[[str], None] | None = None
    summaries: ModelParameters | None = None
    state: ModelState | None = None
    inputs: StepInputs | None = None
    digests: StepDigests | None = None

    def release(self) -> None:
        """Release the copies of the model's parameters."""
        self.summaries = self.state = self.digests = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRun:
    """The plan of one parameter's run. `plan_runs` creates it.

    Attributes
    ----------
    path : Path or RemotePath
    parameter : RecordedParameter
    ids : ndarray of int64, (token,), or None
        Recorded rows of the matrix, in increasing order; None for all.
    coordinates : dict of str to ndarray, (token,)
        Known facts about the recorded tokens.
    memory : int
        Memory of all buffers of this run, in bytes.
    recording : Recording
    populations : dict of str to ndarray of bool, (token,)
        Masks of the recorded tokens, by the names of their coordinates.
    share : TokenShare or None
        Share of this process in the run, if the parameter is sharded.
    hyperparameters : tuple of str
        Names of the numbers of its parameter group, apart from the learning rate.
    """

    path: Location
    parameter: RecordedParameter
    ids: npt.NDArray[np.int64] | None
    coordinates: dict[str, npt.NDArray[Any]]
    memory: int
    recording: Recording
    populations: dict[str, npt.NDArray[np.bool_]]
    share: TokenShare | None
    hyperparameters: tuple[str, ...]

    @property
    def state(self) -> ModelState | None:
        """The state of the model, if the rows of this run hold it."""
        return None if self.recording.options.has_keyframes else self.recording.state

    def of_keyframes(self) -> PlannedRun:
        """Return the plan of the run of the keyframes, a group in this run."""
        options = self.recording.options.of_keyframes
        recording = replace(self.recording, options=options, digests=None)
        return replace(self, path=self.path / KEYFRAMES, recording=recording)

    @property
    def notes(self) -> list[str]:
        """Notes about populations without a token."""
        return [
            f"the population {name.removeprefix(POPULATION)} has no token"
            for name, mask in self.populations.items()
            if not mask.any()
        ]

    @property
    def token(self) -> npt.NDArray[np.int32]:
        """Ids of the recorded tokens."""
        ids = np.arange(len(self.parameter.tensor)) if self.ids is None else self.ids
        return ids.astype(np.int32)

    @property
    def device(self) -> torch.device:
        """Device that the parameter is trained on."""
        return self.recording.loop.device or self.parameter.tensor.device

    @property
    def schedule(self) -> dict[str, Any]:
        """Change of the learning rate; the options take precedence over the loop."""
        recording = self.recording
        return {**recording.loop.schedule, **(recording.options.schedule or {})}

    @property
    def recording_attribute(self) -> dict[str, Any]:
        """Root attribute ``recording``, which a resumed run keeps."""
        options = self.recording.options
        return {
            "parameter": self.parameter.name,
            "vocabulary": len(self.parameter.tensor),
            "every": options.every,
            "logits_mode": options.logits_mode,
        } | ({"keyframe_every": options.keyframe_every} if options.has_keyframes else {})

    def create(
        self,
        types: Mapping[str, str],
        room: Mapping[str, Any],
        in_transit: int,
        kept: Sequence[Entry] = (),
    ) -> RunWriter:
        """Create the run without rows.

        Parameters
        ----------
        types : mapping of str to str
            Native type of each variable of the run.
        room : mapping
            From `trajstore.schema.row_lengths`.
        in_transit : int
            Bytes of `memory` that rows on their way from the device take.
        kept : sequence of Entry
            What the optimizer keeps, if all of that is recorded.

        Raises
        ------
        InvalidArgument
            If that is more than half of it.
        """
        if 2 * in_transit > self.memory:
            raise InvalidArgument(
                f"memory: got {format_bytes(self.memory)}, but the rows in transit from "
                f"{self.device} take {format_bytes(in_transit)}, expected at most half of it; "
                "raise it"
            )
        options = self.recording.options
        chosen: dict[str, Any] = {**self.coordinates, **room}
        return RunWriter.create(
            self.path,
            token=self.token,
            hidden=self.parameter.tensor.shape[1],
            variables=types,
            parameter=self.parameter_names,
            hyperparameter=self.hyperparameters,
            populations=self.populations,
            config=options.config,
            attributes=self._attributes(kept),
            memory=self.memory - in_transit,
            block_rows=options.block_rows,
            overwrite=options.overwrite,
            commit_every=options.commit_every,
            fsync=options.fsync,
            share=self.share,
            encoding=options.encoding,
            on_note=self.recording.on_note,
            **chosen,
        )

    def feed_log(
        self, writer: RunWriter, last_step: int, is_dead: npt.NDArray[np.bool_] | None
    ) -> None:
        """Pass numbers of committed rows after `last_step` to the option `log`, if it is given.

        `is_dead` has the labels of the run.
        """
        options = self.recording.options
        if options.log is None:
            return
        name = "" if options.has_one_run else f"{self.parameter.name}/"
        writer.on_commit = LoggedRows(
            options.log,
            options.log_every,
            writer.layout,
            is_dead,
            last_step=last_step,
            prefix=f"trajstore/{name}",
        )

    @property
    def parameter_names(self) -> tuple[str, ...] | None:
        """Names of all parameters of the model; None if no variable has them."""
        recording = self.recording
        of_model = recording.summaries or self.state or recording.digests
        return None if of_model is None else of_model.names

    def _attributes(self, kept: Sequence[Entry]) -> dict[str, Any]:
        """Root attributes of a new run."""
        recording = self.recording
        owner = self.parameter.optimizer
        assert owner is not None  # it was found when the recording was planned
        optimizer = optimizer_attributes(owner, self.parameter.group, self.schedule)
        if (gradient := self.parameter.tensor.grad) is not None and gradient.is_sparse:
            optimizer["sparse_gradient"] = True
        attributes: dict[str, Any] = {
            "optimizer": optimizer,
            "provenance": provenance(self.device, recording.options.origin),
            "recording": self.recording_attribute,
        }
        if self.state is not None:
            optimizer["groups"] = group_attributes(recording.optimizer)
            attributes |= self.state.attributes()
        if recording.options.whole_state:
            attributes |= state_attribute(recording.optimizer, kept)
        return attributes


def plan_runs(
    path: RunPath,
    parameters: Sequence[RecordedParameter],
    recording: Recording,
    shares: Sequence[TokenShare | None],
) -> list[PlannedRun]:
    """Plan the run of each parameter; they share the memory and the variables of the model.

    `shares` has the share of each parameter that is sharded over processes.

    Raises
    ------
    RunExists
        If the path of a run exists, and is neither resumed nor replaced.
    InvalidArgument
        If the choice of tokens is unknown, the facts about tokens have another vocabulary, or
        several processes would write the encoding ``compact``.
    """
    planned, options = [], recording.options
    for parameter, share in zip(parameters, shares, strict=True):
        place = run_path(path, parameter.name if len(parameters) > 1 else None)
        options.check_place(place)
        if options.log is not None and share is not None:
            raise InvalidArgument(
                "log: got a callable, but several processes record this matrix, each its own "
                "tokens; leave log= out, and read the run with trajstore summary"
            )
        if not options.resume:
            check_encoding(options.encoding, shared=share is not None)
        known = _known_of_vocabulary(options, parameter)
        ids = select_tokens(options.tokens, len(parameter.tensor), known.get("is_dead"))
        masks = _population_masks(options.populations or {}, known, len(parameter.tensor))
        selection = slice(None) if ids is None else ids
        planned.append(
            PlannedRun(
                path=place,
                parameter=parameter,
                ids=ids,
                coordinates={name: values[selection] for name, values in known.items()},
                memory=parse_bytes(options.memory) // (len(parameters) + options.has_keyframes),
                recording=recording,
                populations={name: mask[selection] for name, mask in masks.items()},
                share=share,
                hyperparameters=hyperparameter_names(parameter),
            )
        )
    return planned


def run_path(path: RunPath, parameter: str | None) -> Location:
    """Return the path of a run; with several parameters it is ``NAME.<parameter>.zarr``.

    >>> run_path("run.zarr", "lm_head.weight").name
    'run.lm_head.weight.zarr'
    """
    whole = location(path)
    if parameter is None:
        return whole
    return whole.with_name(f"{whole.name.removesuffix('.zarr')}.{parameter}.zarr")


def run_paths(path: RunPath, options: RecordingOptions) -> list[Location]:
    """Return the path of each run of a recording with these options."""
    has_one_run, names = options.has_one_run, options.parameter
    return [run_path(path, name) for name in ([None] if has_one_run else names or ())]


def _known_of_vocabulary(
    options: RecordingOptions, parameter: RecordedParameter
) -> dict[str, npt.NDArray[Any]]:
    """Return the coordinates of a parameter's whole vocabulary.

    With several parameters, one with another first dimension has no coordinates.
    """
    rows = len(parameter.tensor)
    each = f"the {rows} rows of {parameter.name}"
    known = {}
    for name in ("is_dead", "token_count", "token_text"):
        if getattr(options, name) is None:
            continue
        values = exact(name, getattr(options, name), COORDINATES[name].dtype, each=each)
        if values.shape == (rows,):
            known[name] = values
        elif options.has_one_run:
            raise InvalidArgument(
                f"{name}: got shape {values.shape}, expected one value for each of {each}"
            )
    if "token_count" in known and "is_dead" not in known:
        known["is_dead"] = known["token_count"] == 0
    return known


def _population_masks(
    populations: Mapping[str, Any], known: Mapping[str, npt.NDArray[Any]], tokens: int
) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the mask of each population over a vocabulary, by the name of its coordinate.

    `populations` is as for `analysis.with_populations`; expressions may use the names in `known`.
    """
    if not populations:
        return {}
    import xarray as xr  # takes long

    from trajstore.populations import with_populations

    token = np.arange(tokens, dtype=np.int32)
    ds = xr.Dataset(coords={"token": token, **{k: ("token", v) for k, v in known.items()}})
    return {
        str(name): np.asarray(values)
        for name, values in with_populations(ds, populations).coords.items()
        if name not in ds.coords and str(name).startswith(POPULATION)
    }
