"""Options of a recording, and facts about the training loop.

The options are defined here only. `capture` and `TrajectoryCallback` take them as keywords:
`takes_options` adds them to their signatures and documentation. `select_tokens` resolves the
recorded tokens. The number of threads that torch uses on the CPU decides how it rounds.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import statistics
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import ANY, Bound, Count, check_fields, exact, exact_json
from trajstore.defaults import COMMIT_EVERY, DEFAULT_MEMORY, check_commit_every
from trajstore.errors import InvalidArgument, did_you_mean
from trajstore.schema import EVERYTHING, KEYFRAMES, TIERS, VARIABLES, Encoding, resolve_variables
from trajstore.store.reading.open_group import root_attributes
from trajstore.store.storage.remote_path import METADATA_KEY, RunPath, location
from trajstore.store.writing.create import check_folder, check_target
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.forward_values import LogitsMode
from trajstore.units import parse_bytes

Tokens = str | npt.ArrayLike
"""``all``, ``dead``, ``live``, or ids."""


def check_all_tokens(variables: Iterable[str], tokens: Tokens) -> None:
    """Check that a run with the state of the whole model has the whole matrix.

    Raises
    ------
    InvalidArgument
        If some tokens only are to be recorded.
    """
    received = tokens if isinstance(tokens, str) else "a list of ids"
    everything = [name for name in EVERYTHING if name in set(variables)]
    if received != "all" and everything:
        raise InvalidArgument(
            f"tokens: got {received}, but {everything[0]} is recorded with all tokens of the "
            "matrix; leave out tokens, or select tokens after recording"
        )


def select_tokens(
    tokens: Tokens, vocab_size: int, is_dead: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.int64] | None:
    """Return the ids of the recorded tokens in increasing order; None for all.

    Parameters
    ----------
    tokens : {'all', 'dead', 'live'} or array_like of int
    vocab_size : int
    is_dead : ndarray of bool, (token,), optional
        Needed for ``dead`` and ``live``.

    Raises
    ------
    InvalidArgument
        If the text is unknown, an id is not in the vocabulary, no token is left, or the dead tokens
        are not known.
    """
    if isinstance(tokens, str):
        if tokens == "all":
            return None
        if tokens not in ("dead", "live"):
            raise InvalidArgument(
                f"tokens: got {tokens!r}, expected all, dead, live or a list of ids"
            )
        if is_dead is None:
            raise InvalidArgument(
                f"tokens: got {tokens!r}, but the dead tokens are not known; give is_dead, one "
                "value for each token"
            )
        if not (ids := np.flatnonzero(is_dead == (tokens == "dead"))).size:
            raise InvalidArgument(
                f"tokens: none of the {vocab_size} tokens is {tokens}, so there is nothing to "
                "record; choose other tokens"
            )
        return ids
    if not (ids := np.unique(exact("tokens", tokens, "int64", least=ANY))).size:
        raise InvalidArgument("tokens: got an empty list, expected at least one token id")
    if (unknown := ids[(ids < 0) | (ids >= vocab_size)]).size:
        examples = ", ".join(map(str, unknown[:5])) + (" …" if unknown.size > 5 else "")
        raise InvalidArgument(
            f"tokens: {unknown.size} ids are not in the vocabulary ({examples}); expected 0 to "
            f"{vocab_size - 1}"
        )
    return ids


def read_tokens(path: str | os.PathLike[str]) -> npt.NDArray[np.int64]:
    """Read token ids from a text file: integers between white space; ``#`` starts a comment.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, is empty, or has anything else.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        near = did_you_mean(str(path), ("all", "dead", "live"))
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(
            f"tokens: got {str(path)!r}{near}, expected all, dead, live or a text file with ids "
            f"({reason})"
        ) from error
    ids = []
    for number, line in enumerate(lines, 1):
        for word in line.split("#")[0].split():
            if not word.isdecimal():
                raise InvalidArgument(
                    f"tokens: {path}, line {number}: got {word!r}, expected a token id"
                )
            ids.append(int(word))
    if not ids:
        raise InvalidArgument(f"tokens: {path} has no token id, expected at least one")
    return np.array(ids, np.int64)


P = ParamSpec("P")
R = TypeVar("R")

_NOT_NEGATIVE = Bound("of at least", 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordingOptions:
    """Options of a recording.

    Attributes
    ----------
    variables : str or sequence of str
        Variables, or tiers of them: ``weights``, ``weights+grads``, ``matrix``, ``norms``,
        ``everything``, ``state``, ``keyframes``.
    parameter : str or sequence of str, optional
        Names of matrices (token, hidden). Default: the weight of ``get_output_embeddings()``, else
        of a tied embedding, else of the embedding with the most rows. Several matrices have
        separate runs, ``NAME.<parameter>.zarr``, because a run has one token dimension.
    every : int
        Steps from one row to the next; the last step is always recorded.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Rows of the matrix to record.
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    hidden_from : str, optional
        Name of the module whose output is the hidden states, (batch, position, hidden). Default:
        they are the input of the module that multiplies by the matrix.
    is_dead, token_count, token_text : array_like, (token,), optional
        Facts about the whole vocabulary. Without `is_dead`, tokens that occur 0 times are dead.
    populations : mapping, optional
        Groups of tokens of the whole vocabulary, by name: masks, ids, labels or expressions, as for
        `analysis.with_populations`. They may overlap.
    config, origin : mapping, optional
        JSON values for the root attributes: the configuration, and additions to the provenance,
        such as the identity of the text.
    encoding : {'delta', 'compact'}
        Store each array as differences between steps; or the gradient, and compute W and Adam's
        moments from it. A run that resumes keeps its encoding.
    memory : int or str
        Memory of all buffers of the recorder together.
    block_rows : int, optional
        Rows of a block; default: planned from the memory.
    keyframe_every : int
        Steps from one keyframe to the next, with ``variables="keyframes"``.
    overwrite : bool
        Replace an existing run.
    resume : bool
        Resume the existing run after the step that the training has taken. The first new row drops
        the later ones; without a step, the run stays as it is. If an earlier recording ended early,
        before that step, the rows between stay missing, with a note. Without a run, or with one
        that has no rows yet, begin it.
    allow_gap : bool
        Resume a complete run also if it ends before that step.
    commit_every : float, optional
        Maximum seconds between commits, also of an incomplete block. A killed process loses at most
        this much. None commits complete blocks only, as do several processes that record a sharded
        parameter.
    fsync : bool
        Make every commit survive a loss of power, not only the death of the process.
    schedule : mapping, optional
        Change of the learning rate, JSON values for the attribute ``optimizer``.
    log : callable, optional
        Takes a dict of numbers, such as `wandb.log`: ``trajstore/loss``, ``rows``,
        ``bytes_on_disk``, and mean gradient norms and the fraction of unchanged tokens, dead and
        live. Called after commits, in the thread that writes the run.
    log_every : int
        Steps from one such dict to the next.
    strict_numerics : bool
        Raise an error instead of a note if the optimizer's state cannot decay or grow in its type,
        or the weights cannot decay in theirs.
    strict : bool
        Raise an error instead of a note when a value cannot be recorded.
    """

    variables: str | Sequence[str] = "matrix"
    parameter: str | Sequence[str] | None = None
    every: Count = 1
    tokens: Tokens = "all"
    logits_mode: LogitsMode = "last"
    hidden_from: str | None = None
    is_dead: npt.ArrayLike | None = None
    token_count: npt.ArrayLike | None = None
    token_text: npt.ArrayLike | None = None
    populations: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] | None = None
    encoding: Encoding = "delta"
    memory: int | str = DEFAULT_MEMORY
    block_rows: Count | None = None
    keyframe_every: Count = 500
    overwrite: bool = False
    resume: bool = False
    allow_gap: bool = False
    commit_every: float | None = COMMIT_EVERY
    fsync: bool = True
    schedule: Mapping[str, Any] | None = None
    log: Callable[[dict[str, float]], Any] | None = None
    log_every: Count = 50
    strict_numerics: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_all_tokens(resolve_variables(self._names), self.tokens)
        for name in ("config", "origin", "schedule"):
            exact_json(name, dict(getattr(self, name) or {}))
        parse_bytes(self.memory)
        check_commit_every(self.commit_every)
        if self.has_keyframes and self.every != 1:
            raise InvalidArgument(
                f"every: got {self.every}, but the tier {KEYFRAMES} has a row of each step; leave "
                "out every, and set keyframe_every"
            )
        if self.resume and self.overwrite:
            raise InvalidArgument(
                "got both resume and overwrite; use either resume or overwrite, not both"
            )

    @property
    def resolved(self) -> tuple[str, ...]:
        """Names of all requested variables, tiers resolved, in the schema's order."""
        return resolve_variables(self._names)

    @property
    def required(self) -> frozenset[str]:
        """Variables requested by name, which a run must not lack.

        Variables of a tier are left out if the training does not provide them.
        """
        return frozenset((VARIABLES.keys() - TIERS.keys()).intersection(self._names))

    @property
    def whole_state(self) -> bool:
        """True if all that the optimizer keeps in a parameter's shape is recorded, by its names."""
        return not {"matrix", "everything", "state", KEYFRAMES}.isdisjoint(self._names)

    @property
    def has_keyframes(self) -> bool:
        """True if the whole state is recorded in keyframes, and what the steps between need."""
        return KEYFRAMES in self._names

    @property
    def of_keyframes(self) -> RecordingOptions:
        """The options of the run of the keyframes."""
        return replace(self, variables="state", every=self.keyframe_every, block_rows=1,
                       encoding="delta", log=None, overwrite=False)  # fmt: skip

    @property
    def has_one_run(self) -> bool:
        """True if there is one parameter, whose run is at the path itself."""
        return self.parameter is None or isinstance(self.parameter, str)

    def check_path(self, path: RunPath) -> None:
        """Check that a recording to a path is possible, as far as it is known yet.

        The paths of several parameters depend on the model, so they are checked later.

        Raises
        ------
        RunExists
            As `check_place`.
        InvalidArgument
            If this user cannot write to the folder.
        """
        if self.has_one_run:
            self.check_place(path)
        check_folder(path)

    def check_place(self, run: RunPath) -> None:
        """Check that a run can be created or resumed at a path.

        Raises
        ------
        RunExists
            If the path exists, and neither `overwrite` nor `resume` is set, or it is not a run.
        """
        if not (self.resume and _has_rows(run)):
            check_target(run, overwrite=self.overwrite or self.resume)

    def resumed_or_new(self, runs: Iterable[RunPath]) -> RecordingOptions:
        """Return these options; without `resume` if none of the runs has rows to resume."""
        if not self.resume or any(map(_has_rows, runs)):
            return self
        return replace(self, resume=False, overwrite=True)

    @property
    def _names(self) -> list[str]:
        names = self.variables.split(",") if isinstance(self.variables, str) else self.variables
        return [name.strip() for name in names]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoop:
    """Facts about the training loop that no hook provides.

    Attributes
    ----------
    scaler : GradScaler, optional
        Scaler of the loop's loss.
    max_grad_norm : float, optional
        Global norm to which the loop clips gradients; 0 if it does not. Default: not known.
    first_step : int
        Optimizer steps taken before.
    device : torch.device, optional
        Device for the provenance; default: that of the recorded parameter.
    schedule : mapping
        Change of the learning rate, JSON values; those of the options take precedence.
    examples : int, optional
        Maximum number of examples of a step, over all micro-batches and processes; default: as many
        as in the first step.
    """

    scaler: Any = None
    max_grad_norm: Annotated[float, _NOT_NEGATIVE] | None = None
    first_step: Annotated[int, _NOT_NEGATIVE] = 0
    device: torch.device | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    examples: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def _has_rows(run: RunPath) -> bool:
    if not (location(run) / METADATA_KEY).exists():
        return False
    return bool(root_attributes(run)["committed_rows"])


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that creates `RecordingOptions` from its ``**options``.

    Its signature and documentation list the options in place of ``**options``. An unknown keyword
    raises a `TypeError` with the most similar name.
    """
    signature = _signature_with_options(function)
    takes = [name for name in signature.parameters if name != "self"]

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in takes:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument "
                    f"{name!r}{did_you_mean(name, takes)}; it takes {', '.join(takes)}"
                )
        return function(*arguments, **keywords)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documentation_with_options(function)
    return call


def _signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    named = [
        entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(option.name, kind, default=option.default, annotation=option.type)
        for option in fields(RecordingOptions)
        if option.name not in signature.parameters
    ]
    return signature.replace(parameters=[*named, *options])


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


_SIZE = 512  # rows of the matrix that is multiplied
_WORTH = 1.2  # ratio of times that is worth a note


def slower_threads() -> str | None:
    """Return a note if torch multiplies matrices faster with one thread than with its own number.

    That is so where other programs use the processors. Both are timed on a float32 product.
    """
    if (several := torch.get_num_threads()) == 1:
        return None
    matrix = torch.ones(_SIZE, _SIZE, device="cpu")
    with_several = _seconds(matrix)
    with process_mode(1):
        with_one = _seconds(matrix)
    if with_several <= _WORTH * with_one:
        return None
    ratio = with_several / with_one
    return (
        f"one thread computes {ratio:.1f} times as fast as {several} threads now, so other "
        "programs use the processors; training.threads=1 would be faster, and changes the bits"
    )


def _seconds(matrix: torch.Tensor) -> float:
    return statistics.median(timeit.repeat(lambda: matrix @ matrix, number=1))
