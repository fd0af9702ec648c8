"""Attaching a recorder to a training: `capture` for any loop, and what the callback shares."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.existing import ExistingRun
from trainers.forward import LogitsMode
from trainers.history import History, WriterFactory
from trainers.parameter import RecordedParameter, find_parameters
from trainers.provenance import optimizer_attributes, provenance, resumed_provenance
from trainers.recorder import Recorder, real_optimizer
from trainers.tokens import Tokens, select_tokens
from trajstore.errors import InvalidArgument, RecordingError
from trajstore.group import open_group
from trajstore.layout import DEFAULT_MEMORY, parse_bytes
from trajstore.schema import TIERS, VARIABLES, resolve_record
from trajstore.target import check_target
from trajstore.writer import RunWriter

__all__ = ["Recording", "capture", "run_path"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What to record of a training, and where to.

    Attributes
    ----------
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    parameter : str or sequence of str, optional
        Names of matrices (token, hidden); without it, the model's unembedding. Each of several has
        a run of its own, ``NAME.<parameter>.zarr``: a run has one token dimension.
    record : str or sequence of str
        Variables, or tiers of them: ``weights``, ``weights+grads``, ``all``.
    every : int
        Steps from one row to the next; the last step is always recorded.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Which rows of the matrix.
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    is_dead, token_count, token_text : array_like, (token,), optional
        What is known about the whole vocabulary.
    config, origin : mapping, optional
        JSON values for the root attributes: how to run it again, and what to add to its
        provenance, such as the identity of the text.
    memory : int or str
        For all buffers of the recorder together.
    block_rows : int, optional
        Rows of a block; planned from the memory without it.
    encoding : str, optional
        Chain of codecs; the writer's own choice without it.
    overwrite : bool
        Replace a run that is there.
    resume : bool
        Go on with the run that is there, after the step that the training has taken; rows past it
        are dropped.
    fsync : bool
        Have every commit survive a loss of power.
    schedule : mapping, optional
        How the learning rate changes, JSON values for the attribute ``optimizer``.
    """

    path: str | os.PathLike[str]
    parameter: str | Sequence[str] | None = None
    record: str | Sequence[str] = "all"
    every: int = 1
    tokens: Tokens = "all"
    logits_mode: LogitsMode = "last"
    is_dead: npt.ArrayLike | None = None
    token_count: npt.ArrayLike | None = None
    token_text: npt.ArrayLike | None = None
    config: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    memory: int | str = DEFAULT_MEMORY
    block_rows: int | None = None
    encoding: str | None = None
    overwrite: bool = False
    resume: bool = False
    fsync: bool = False
    schedule: Mapping[str, Any] | None = None
    _variables: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = self.record if isinstance(self.record, str) else tuple(self.record)
        object.__setattr__(self, "_variables", resolve_record(names))
        if self.every < 1:
            raise InvalidArgument(f"every: got {self.every}, expected at least 1")
        if self.logits_mode not in ("last", "mean"):
            raise InvalidArgument(
                f"logits_mode: got {self.logits_mode!r}, expected 'last' or 'mean'"
            )
        parse_bytes(self.memory)
        if self.resume and self.overwrite:
            raise InvalidArgument(
                "resume and overwrite: got both; a run is either gone on with or replaced"
            )
        if self.parameter is None or isinstance(self.parameter, str):
            self._check_target(Path(self.path))

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        device: torch.device | None = None,
        schedule: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Recorder:
        """Recorder that watches a training from now on.

        In all processes but the first of a distributed training it only counts.

        Parameters
        ----------
        model : Module
        optimizer : Optimizer
        device : torch.device, optional
            For the provenance; that of the parameter without it.
        schedule : mapping, optional
            How the learning rate changes, for the attributes of the run.
        **options
            Of `Recorder`.

        Raises
        ------
        RecordingError
            If a parameter cannot be recorded.
        RunExists
            If something is at the path, and it is not to be gone on with.
        RunNotFound
            If nothing is there to go on with.
        """
        real = real_optimizer(optimizer)
        parameters = find_parameters(model, self.parameter)
        if _rank() != 0:
            return Recorder(model, real, (), **options)
        recorder: Recorder
        memory = parse_bytes(self.memory) // len(parameters)
        plan = {**(schedule or {}), **(self.schedule or {})}

        def factory(
            number: int, parameter: RecordedParameter, ids: Any, path: Path
        ) -> WriterFactory:
            self._check_target(path)

            def create(types: dict[str, str]) -> RunWriter:
                group = recorder.param_groups[number]
                attributes = {
                    "optimizer": optimizer_attributes(real, group, plan),
                    "provenance": provenance(device or parameter.tensor.device, self.origin),
                    "recording": self._attributes(parameter),
                }
                return self._create(path, parameter, ids, types, attributes, memory)

            return create

        named = {self.record} if isinstance(self.record, str) else set(self.record)
        named = {name.strip() for entry in named for name in entry.split(",")}
        required = frozenset(named & set(VARIABLES) - set(TIERS))
        first_step = options.get("first_step", 0)
        histories = []
        for number, parameter in enumerate(parameters):
            path = run_path(self.path, parameter.name if len(parameters) > 1 else None)
            ids = select_tokens(self.tokens, len(parameter.tensor), self._is_dead(parameter))
            existing = None
            if self.resume:
                existing = ExistingRun.find(
                    path,
                    step=first_step,
                    recording=self._attributes(parameter),
                    variables=self._variables,
                    required=required,
                    tokens=np.arange(len(parameter.tensor)) if ids is None else ids,
                    attributes=self._resumed(
                        path, device or parameter.tensor.device, plan, first_step
                    ),
                    memory=memory,
                    fsync=self.fsync,
                )
            histories.append(
                History(
                    parameter,
                    ids=None if ids is None else torch.from_numpy(ids),
                    variables=self._variables,
                    required=required,
                    create=factory(number, parameter, ids, path),
                    every=self.every,
                    first_step=first_step,
                    existing=existing,
                )
            )
        recorder = Recorder(model, real, histories, logits_mode=self.logits_mode, **options)
        try:
            # Only now that nothing is refused any more: it drops rows.
            for history in histories:
                history.open()
        except BaseException:
            recorder.close(complete=False)
            raise
        return recorder

    def _check_target(self, path: Path) -> None:
        if self.resume:
            open_group(path)
        else:
            check_target(path, overwrite=self.overwrite)

    def _attributes(self, parameter: RecordedParameter) -> dict[str, Any]:
        return {
            "parameter": parameter.name,
            "vocabulary": len(parameter.tensor),
            "every": self.every,
            "logits_mode": self.logits_mode,
        }

    def _resumed(
        self, path: Path, device: torch.device, schedule: dict[str, Any], step: int
    ) -> dict[str, Any]:
        """Attributes of a run that goes on: as they were, with what has changed since."""
        before = open_group(path).attrs.asdict()
        attributes: dict[str, Any] = {
            "optimizer": {**before.get("optimizer", {}), "schedule": schedule},
            "provenance": resumed_provenance(before.get("provenance", {}), device, step),
        }
        if self.config is not None:
            attributes["config"] = dict(self.config)
        return attributes

    def _is_dead(self, parameter: RecordedParameter) -> npt.NDArray[np.bool_] | None:
        if self.is_dead is None:
            return None
        dead = np.asarray(self.is_dead, bool)
        return dead if dead.shape == (len(parameter.tensor),) else None

    def _create(
        self,
        path: Path,
        parameter: RecordedParameter,
        ids: npt.NDArray[np.int64] | None,
        types: dict[str, str],
        attributes: dict[str, Any],
        memory: int,
    ) -> RunWriter:
        rows, hidden = parameter.tensor.shape
        token = np.arange(rows, dtype=np.int32) if ids is None else ids.astype(np.int32)
        coordinates: dict[str, Any] = {}
        for name in ("is_dead", "token_count", "token_text"):
            values = getattr(self, name)
            if values is None:
                continue
            values = np.asarray(values)
            if values.shape == (rows,):
                coordinates[name] = values[token]
            elif self.parameter is None or isinstance(self.parameter, str):
                raise InvalidArgument(
                    f"{name}: got shape {values.shape}, expected one value for each of the {rows} "
                    f"rows of {parameter.name}"
                )
        chosen = {} if self.encoding is None else {"encoding": self.encoding}
        return RunWriter.create(
            path,
            token=token,
            hidden=hidden,
            variables=types,
            config=self.config,
            attributes=attributes,
            memory=memory,
            block_rows=self.block_rows,
            overwrite=self.overwrite,
            fsync=self.fsync,
            **coordinates,
            **chosen,
        )


def run_path(path: str | os.PathLike[str], parameter: str | None) -> Path:
    """Where the run of one of several parameters is: ``NAME.<parameter>.zarr``.

    >>> run_path("run.zarr", "lm_head.weight").name
    'run.lm_head.weight.zarr'
    """
    whole = Path(path)
    if parameter is None:
        return whole
    return whole.with_name(f"{whole.name.removesuffix('.zarr')}.{parameter}.zarr")


def _rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


@contextlib.contextmanager
def capture(
    model: torch.nn.Module,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    parameter: str | Sequence[str] | None = None,
    record: str | Sequence[str] = "all",
    every: int = 1,
    tokens: Tokens = "all",
    logits_mode: LogitsMode = "last",
    scaler: Any = None,
    max_grad_norm: float = 0.0,
    is_dead: npt.ArrayLike | None = None,
    token_count: npt.ArrayLike | None = None,
    token_text: npt.ArrayLike | None = None,
    config: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    memory: int | str = DEFAULT_MEMORY,
    block_rows: int | None = None,
    encoding: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    first_step: int = 0,
    fsync: bool = False,
    schedule: Mapping[str, Any] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
) -> Iterator[Recorder]:
    """Record a plain PyTorch loop, every optimizer step inside the ``with``.

    The run is ``complete`` when the block ends, and ``interrupted`` when an exception leaves it.

    Parameters
    ----------
    model : Module
        Wrapped by `torch.compile` or `DistributedDataParallel` or not. In training mode while it
        is trained: forward passes in evaluation mode are not recorded.
    optimizer : Optimizer
        Any; moments are recorded where it has Adam's.
    path, parameter, record, every, tokens, logits_mode
        See `Recording`.
    scaler : GradScaler, optional
        That scales the loss. Gradients are recorded unscaled, and steps it skips as ``skipped``.
    max_grad_norm : float
        Norm that the loop clips all gradients to. The recorded ``clip_coef`` is checked against
        what became of the gradient, and NaN where they do not agree; 0 is no clipping.
    is_dead, token_count, token_text, config, origin, memory, block_rows, encoding, overwrite
        See `Recording`.
    resume, fsync, schedule
        Likewise.
    first_step : int
        Optimizer steps that the loop has taken before.
    on_step : callable, optional
        Called with the recorder after every optimizer step.

    Yields
    ------
    Recorder
        Its `~Recorder.observe` takes the loss where the model does not return it.

    Raises
    ------
    RecordingError
        If the parameter is not found, frozen, or not the optimizer's.
    RunExists
        If something is at `path`, and `resume` is not set.
    NothingToResume
        If `resume` is set, and the run has not come to `first_step`, or has other weights there.

    Examples
    --------
    >>> import tempfile, torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with capture(model, optimizer, path, parameter="0.weight") as run:
    ...     for _ in range(3):
    ...         ids = torch.randint(0, 5, (4, 7))
    ...         loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    ...         loss.backward()
    ...         run.observe(loss=loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> from trajstore import open_run
    >>> open_run(path).grad.shape
    (4, 5, 3)
    """
    recording = Recording(
        path=path,
        parameter=parameter,
        record=record,
        every=every,
        tokens=tokens,
        logits_mode=logits_mode,
        is_dead=is_dead,
        token_count=token_count,
        token_text=token_text,
        config=config,
        origin=origin,
        memory=memory,
        block_rows=block_rows,
        encoding=encoding,
        overwrite=overwrite,
        resume=resume,
        fsync=fsync,
        schedule=schedule,
    )
    recorder = recording.attach(
        model,
        optimizer,
        schedule={"max_grad_norm": max_grad_norm},
        scaler=scaler,
        max_grad_norm=max_grad_norm,
        first_step=first_step,
        on_step=on_step,
    )
    try:
        yield recorder
    except BaseException:
        recorder.close(complete=False)
        raise
    recorder.close(complete=True)
    if recorder.writer is None and _rank() == 0:
        raise RecordingError(
            f"no optimizer step was taken while {path} was to be recorded, so there is no run"
        )
