"""What is asked of a recording, and what it must be told of the loop that it watches.

The list of options is written once, here. `capture` and `TrajectoryCallback` take the same names as
keywords: `takes_options` shows them in their signatures and their documentation.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec, TypeVar, get_args

import numpy.typing as npt
import torch

from trajstore.byte_sizes import DEFAULT_MEMORY, parse_bytes
from trajstore.errors import InvalidArgument
from trajstore.nearest_name import did_you_mean
from trajstore.schema import TIERS, VARIABLES, Encoding, resolve_record
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import RunPath
from trajstore.store.writing.commit_timer import COMMIT_EVERY, check_commit_every
from trajstore.store.writing.create import check_target
from trajstore.store.writing.replay_encoding import check_encoding
from trajstore.trainers.recording.forward_values import LogitsMode
from trajstore.trainers.recording.token_selection import Tokens

__all__ = ["RecordingOptions", "TrainingLoop", "takes_options"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordingOptions:
    """What to record of a training, and how.

    Attributes
    ----------
    record : str or sequence of str
        Variables, or tiers of them: ``weights``, ``weights+grads``, ``all``, ``model``.
    parameter : str or sequence of str, optional
        Names of matrices (token, hidden); without it, the model's unembedding. Each of several has
        a run of its own, ``NAME.<parameter>.zarr``: a run has one token dimension.
    every : int
        Steps from one row to the next; the last step is always recorded.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Which rows of the matrix.
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    is_dead, token_count, token_text : array_like, (token,), optional
        What is known about the whole vocabulary. Without `is_dead`, tokens that occur 0 times are
        dead.
    populations : mapping, optional
        Groups of tokens of the whole vocabulary, by name: masks, ids, labels or expressions, as
        `analysis.with_populations` takes them. They may overlap.
    config, origin : mapping, optional
        JSON values for the root attributes: how to run it again, and what to add to its
        provenance, such as the identity of the text.
    encoding : {'delta', 'replay'}
        Store each array as differences between steps; or the gradient, and compute W and Adam's
        moments from it. A run that resumes keeps its encoding.
    memory : int or str
        For all buffers of the recorder together.
    block_rows : int, optional
        Rows of a block; planned from the memory without it.
    overwrite : bool
        Replace a run that is there.
    resume : bool
        Go on with the run that is there, after the step that the training has taken; rows past it
        are dropped.
    commit_every : float, optional
        Seconds after a commit at which rows are committed that are no whole block yet: so late
        readers see a row, and so much a killed process loses. None for whole blocks only, as it is
        where several processes record a parameter that is sharded over them.
    fsync : bool
        Have every commit survive a loss of power, not only the death of the process.
    schedule : mapping, optional
        How the learning rate changes, JSON values for the attribute ``optimizer``.
    strict_numerics : bool
        Refuse to record where the type of the optimizer's state keeps it from decaying or growing,
        or that of the weights keeps them from decaying, instead of saying so.
    """

    record: str | Sequence[str] = "all"
    parameter: str | Sequence[str] | None = None
    every: int = 1
    tokens: Tokens = "all"
    logits_mode: LogitsMode = "last"
    is_dead: npt.ArrayLike | None = None
    token_count: npt.ArrayLike | None = None
    token_text: npt.ArrayLike | None = None
    populations: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    encoding: Encoding = "delta"
    memory: int | str = DEFAULT_MEMORY
    block_rows: int | None = None
    overwrite: bool = False
    resume: bool = False
    commit_every: float | None = COMMIT_EVERY
    fsync: bool = True
    schedule: Mapping[str, Any] | None = None
    strict_numerics: bool = False

    def __post_init__(self) -> None:
        resolve_record(self._names)
        if self.every < 1:
            raise InvalidArgument(f"every: got {self.every}, expected at least 1")
        if self.logits_mode not in get_args(LogitsMode):
            expected = " or ".join(map(repr, get_args(LogitsMode)))
            raise InvalidArgument(f"logits_mode: got {self.logits_mode!r}, expected {expected}")
        if self.block_rows is not None and self.block_rows < 1:
            raise InvalidArgument(f"block_rows: got {self.block_rows}, expected at least 1")
        check_encoding(self.encoding)
        parse_bytes(self.memory)
        check_commit_every(self.commit_every)
        if self.resume and self.overwrite:
            raise InvalidArgument(
                "resume and overwrite: got both; a run is either gone on with or replaced"
            )

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of all variables that are asked for, tiers resolved, in the schema's order."""
        return resolve_record(self._names)

    @property
    def required(self) -> frozenset[str]:
        """Those that are named themselves, which a run must not go without.

        What only a tier names, and the training does not show, is left out.
        """
        entries = (self._names,) if isinstance(self._names, str) else self._names
        asked = {name.strip() for entry in entries for name in entry.split(",")}
        return frozenset(asked & VARIABLES.keys() - TIERS.keys())

    @property
    def has_one_run(self) -> bool:
        """Whether one parameter is meant, whose run is at the path itself."""
        return self.parameter is None or isinstance(self.parameter, str)

    def check_path(self, path: RunPath) -> None:
        """Insist that what is wanted can be recorded at a path, as far as it shows already.

        The runs of several parameters lie beside it, under names that the model has to tell.

        Raises
        ------
        RunExists, RunNotFound
            As `check_place`.
        """
        if self.has_one_run:
            self.check_place(path)

    def check_place(self, run: RunPath) -> None:
        """Insist that a run can be made in a place, or gone on with.

        Raises
        ------
        RunExists
            If something is there, and it is neither to be replaced nor gone on with.
        RunNotFound
            If nothing is there to go on with.
        """
        if self.resume:
            open_group(run)
        else:
            check_target(run, overwrite=self.overwrite)

    @property
    def _names(self) -> str | tuple[str, ...]:
        return self.record if isinstance(self.record, str) else tuple(self.record)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoop:
    """What a recording must be told of the loop, because no hook sees it.

    Attributes
    ----------
    scaler : GradScaler, optional
        That the loop scales its loss with.
    max_grad_norm : float
        Global norm that the loop clips gradients to; 0 if it does not, or not to a global norm.
    loss_scale : float
        What the loop multiplies a loss by that the model was given ``num_items_in_batch`` for.
    first_step : int
        Optimizer steps taken before.
    device : torch.device, optional
        For the provenance; that of the recorded parameter without it.
    schedule : mapping
        How the loop changes the learning rate, JSON values; those of the options win.
    examples : int, optional
        Most examples that a step has, of all micro-batches and processes; as many as the first
        step has without it.
    """

    scaler: Any = None
    max_grad_norm: float = 0.0
    loss_scale: float = 1.0
    first_step: int = 0
    device: torch.device | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    examples: int | None = None


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function that makes `RecordingOptions` of its ``**options``.

    Its signature and its documentation show the options in the place of ``**options``. A keyword
    that is neither one of them nor its own is a `TypeError` that names the closest one.
    """
    shown = _signature_with_options(function)
    takes = [name for name in shown.parameters if name != "self"]

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in takes:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument "
                    f"{name!r}{did_you_mean(name, takes)}; it takes {', '.join(takes)}"
                )
        return function(*arguments, **keywords)

    call.__signature__ = shown  # type: ignore[attr-defined]
    call.__doc__ = _documentation_with_options(function)
    return call


def _signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    own = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.type,
        )
        for option in fields(RecordingOptions)
        if option.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *options])


def _documentation_with_options(function: Callable[..., Any]) -> str | None:
    if not function.__doc__ or not RecordingOptions.__doc__:
        return None  # under python -OO
    options = inspect.cleandoc(RecordingOptions.__doc__).partition("----------\n")[2]
    return re.sub(
        r"^\*\*options\n(    .*\n?)+",
        lambda _: f"{options}\n",
        inspect.cleandoc(function.__doc__),
        flags=re.MULTILINE,
    )
