"""A callback for the `Trainer` of Hugging Face; what its data set and tokenizer tell of tokens."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers import (
    BatchEncoding,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trajstore.errors import RecordingError
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.capture import Recorder, open_recorder
from trajstore.trainers.recording.existing_run import Comparison
from trajstore.trainers.recording.hooks import WatchedCall
from trajstore.trainers.recording.notes import report_notes
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, takes_options
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    RecordedParameter,
    find_parameters,
    unwrap,
)
from trajstore.trainers.recording.planned_run import run_paths
from trajstore.trainers.texts import token_texts

COUNTING_SECONDS = 5.0
"""Approximate time limit for counting a data set; a slower count is discarded."""

_TOKENS = ("input_ids", "attention_mask", "labels")
"""Columns of an example that are read."""

_BATCH = 1000  # examples that are read from a table at once


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFacts:
    """Options that a Trainer provides, and notes about them.

    Attributes
    ----------
    options : dict
        Options of `RecordingOptions`: ``is_dead``, ``token_count`` and ``token_text``, if known.
    origin : dict
        Entries of the provenance of the run.
    notes : list of str
    """

    options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def added_to(self, options: RecordingOptions) -> RecordingOptions:
        """Return options in which missing values are filled in."""
        return replace(options, **self.options, origin={**(options.origin or {}), **self.origin})


class NotCounted(Exception):
    """Reason why the tokens of a data set are not counted."""


def facts_of_trainer(
    model: torch.nn.Module,
    parameters: tuple[RecordedParameter, ...],
    options: RecordingOptions,
    *,
    data_loader: Any,
    tokenizer: Any,
    processes: int,
    seconds: float = COUNTING_SECONDS,
) -> TokenFacts:
    """Find dead tokens, occurrences and texts of tokens, unless the options have them.

    The occurrences of a token are the larger of two counts: inputs with attention, and labels.
    Changes by a collator are not counted. A failure becomes a note.

    Parameters
    ----------
    model : Module
        A language model; its output embeddings have the size of its vocabulary.
    parameters : tuple of RecordedParameter
        Facts are added only if these are the model's embeddings.
    options : RecordingOptions
        They take precedence.
    data_loader : DataLoader
        The Trainer's. Its data set is counted if reading cannot change it: a list or tuple of
        dicts, a table of Hugging Face datasets, or a `Subset` or `ConcatDataset` of those.
    tokenizer : object
        The Trainer's ``processing_class``.
    processes : int
        Number of processes of the training.
    seconds : float
        Approximate time limit for counting.
    """
    facts = TokenFacts()
    needs_dead = isinstance(options.tokens, str) and options.tokens in ("dead", "live")
    if options.resume and not needs_dead:
        return facts  # a resumed run keeps its coordinates
    if options.is_dead is None and options.token_count is None:
        remedy = "give is_dead= or token_count=, or label them later with: trajstore annotate"
        with _note_failures(facts, "which tokens are dead", remedy):
            if (rows := _vocabulary(model, parameters)) is not None:
                data_set = getattr(data_loader, "dataset", None)
                _add_counts(facts, *_counted(data_set, rows, processes, seconds))
    if options.token_text is None:
        with _note_failures(facts, "the texts of its tokens", "give token_text="):
            rows = _vocabulary(model, parameters)
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if rows is not None and backend is not None:
                _add_texts(facts, token_texts(backend), rows)
    return facts


@contextlib.contextmanager
def _note_failures(facts: TokenFacts, fact: str, remedy: str) -> Iterator[None]:
    """Turn an error into a note, because no failure here may end a training run."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, NotCounted) else f"of an error: {error!r}"
        facts.notes.append(f"the run does not record {fact}, because {reason}; {remedy}")


def _add_counts(facts: TokenFacts, counts: npt.NDArray[np.int64], examples: int) -> None:
    dead = counts == 0
    facts.options.update(is_dead=dead, token_count=counts)
    facts.origin["tokens_counted"] = {"examples": examples, "tokens": int(counts.sum())}
    facts.notes.append(
        f"is_dead and token_count come from the {examples} examples of the Trainer's data set: "
        f"{np.count_nonzero(dead)} of {len(counts)} tokens are dead; set is_dead= or token_count= "
        "to override them"
    )


def _add_texts(facts: TokenFacts, texts: tuple[str, ...], rows: int) -> None:
    if len(texts) > rows:
        raise NotCounted(f"the tokenizer has {len(texts)} tokens, and the matrix {rows} rows")
    facts.options["token_text"] = [*texts, *[""] * (rows - len(texts))]  # the rest pads the matrix


def _vocabulary(model: torch.nn.Module, parameters: tuple[RecordedParameter, ...]) -> int | None:
    """Return the number of rows of the output embeddings; None if the facts would be wrong.

    The facts apply to every recorded matrix with this number of rows, so all of them have to be
    embeddings.
    """
    if (output := _weight(model, "get_output_embeddings")) is None:
        return None
    alike = [parameter.tensor for parameter in parameters if len(parameter.tensor) == len(output)]
    others = [tensor for tensor in alike if tensor is not output]
    known = all(tensor is _weight(model, "get_input_embeddings") for tensor in others)
    return len(output) if alike and known else None


def _weight(model: torch.nn.Module, method: str) -> Any:
    return getattr(getattr(unwrap(model), method, lambda: None)(), "weight", None)


def _counted(
    data_set: Any, rows: int, processes: int, seconds: float
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the occurrences of each token, and the number of examples."""
    if processes > 1:
        raise NotCounted("several processes train, and each would have to count")
    _require_stateless(data_set)
    counts = {name: np.zeros(rows, np.int64) for name in ("input_ids", "labels")}
    end = monotonic() + seconds
    for part in _parts(data_set):
        for name, ids in part.items():
            if ids.size and not 0 <= ids.min() <= ids.max() < rows:
                raise NotCounted(f"its {name} exceed the {rows} tokens of the model")
            counts[name] += np.bincount(ids, minlength=rows)
        if monotonic() > end:
            raise NotCounted(
                f"counting the {len(data_set)} examples of its data set takes more than about "
                f"{seconds:g} s"
            )
    return np.maximum(counts["input_ids"], counts["labels"]), len(data_set)


def _require_stateless(data_set: Any) -> None:
    """Raise an error for a data set that reading may change, and with it the training.

    Types are compared exactly, because a subclass may read its examples differently.
    """
    kind = type(data_set)
    if data_set is None:
        raise NotCounted("the Trainer has no data set")
    if isinstance(data_set, IterableDataset) or not hasattr(kind, "__len__"):
        raise NotCounted("the Trainer's data set is streamed")
    if kind is ConcatDataset:
        for part in data_set.datasets:
            _require_stateless(part)
    elif kind is Subset:
        _require_kind(data_set.indices, list, tuple, range, np.ndarray, torch.Tensor)
        _require_stateless(data_set.dataset)
    elif not _is_table(data_set):
        _require_kind(data_set, list, tuple)
    elif data_set.format["type"] == "custom":
        raise NotCounted("its data set has a transform, which may change at each call")


def _require_kind(value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        raise NotCounted(
            f"its data set has the class {type(value).__name__}, and reading it could change the "
            "training"
        )


def _is_table(data_set: Any) -> bool:
    """Return True for a table of Hugging Face, not for a user's module named `datasets`."""
    kind = type(data_set)
    return f"{kind.__module__}.{kind.__qualname__}" == "datasets.arrow_dataset.Dataset"


def _parts(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    """Yield token ids of some examples at a time: inputs and labels."""
    if type(data_set) is ConcatDataset:
        for part in data_set.datasets:
            yield from _parts(part)
    elif type(data_set) is Subset and _is_table(data_set.dataset):
        table: Any = data_set.dataset
        yield from _parts_of_table(table.select([int(number) for number in data_set.indices]))
    elif _is_table(data_set):
        yield from _parts_of_table(data_set)
    else:
        yield from (_of_example(data_set[number]) for number in range(len(data_set)))


def _parts_of_table(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    form = data_set.format
    visible = data_set.column_names if form["output_all_columns"] else form["columns"]
    columns = [name for name in _TOKENS if name in visible]
    if "input_ids" not in columns:
        raise NotCounted("the examples of its data set have no input_ids")
    table = data_set.with_format("arrow", columns=columns)
    for batch in table.iter(batch_size=_BATCH):
        arrays = {name: batch[name].combine_chunks() for name in columns}
        yield _selected({
            name: _of_lists(name, array)
            for name, array in arrays.items()
            if hasattr(array, "value_lengths")  # labels may be single classes
        })  # fmt: skip


def _of_lists(name: str, array: Any) -> npt.NDArray[Any]:
    """Return the values of an Arrow array of lists, or of lists of lists."""
    nulls = array.null_count
    while hasattr(array, "value_lengths"):
        array = array.flatten()
        nulls += array.null_count
    if nulls:
        raise NotCounted(f"{name} of its data set have nulls")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _of_example(example: Any) -> dict[str, npt.NDArray[np.int64]]:
    if type(example) not in (dict, BatchEncoding):
        raise NotCounted(f"examples of its data set are {type(example).__name__}, not dicts")
    flat = {}
    for name in _TOKENS:
        if name in example and example[name] is not None:
            values = torch.as_tensor(example[name], device="cpu").detach()
            if values.ndim:  # labels may be a single class
                # NumPy has no bfloat16.
                exact = values.double() if values.is_floating_point() else values
                flat[name] = exact.flatten().numpy()
    return _selected(flat)


def _selected(flat: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
    """Return inputs with attention, and labels with a target."""
    if "input_ids" not in flat:
        raise NotCounted("the examples of its data set have no input_ids")
    ids, mask = flat["input_ids"], flat.get("attention_mask")
    if ids.size and ids.dtype.kind not in "iu":
        raise NotCounted("input_ids of its data set are not integers")
    if mask is not None and mask.shape == ids.shape:
        ids = ids[mask != 0]
    labels = flat.get("labels", np.empty(0, np.int64))
    labels = labels[labels >= 0] if labels.dtype.kind in "iu" else np.empty(0, np.int64)
    chosen = {"input_ids": ids, "labels": labels}
    return {name: values.astype(np.int64, copy=False) for name, values in chosen.items()}


_recording: set[TrajectoryCallback] = set()
"""Callbacks whose training has started and, as far as they know, not ended."""

_TRAIN = WatchedCall(Trainer, "train")
"""`Trainer.train`, which does not report a failure to its callbacks."""


class TrajectoryCallback(TrainerCallback):
    """Records a parameter of the trained model at every optimizer step.

    Gradient accumulation, clipping, mixed precision and distributed training work as in the
    Trainer; the first process records. Dead tokens, occurrences and texts of tokens come from the
    Trainer's data set and tokenizer, unless they are given. The data set has to be a list of dicts
    or a table of Hugging Face datasets, with ``input_ids``, and countable in seconds.

    Attributes
    ----------
    recorder : Recorder or None
        None until the training starts.
    comparison : Comparison or None
        If set before the training starts, each row is compared with the existing run instead of
        being stored.
    prints_end : bool
        If True, print the path of the run at the end of the training.

    Raises
    ------
    RunExists
        If `path` exists, and neither `resume` nor `overwrite` is set.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=8, n_layer=1, n_head=1))
    >>> model.loss_type = "ForCausalLM"
    >>> texts = [{"input_ids": [*text], "labels": [*text]} for text in (b"the cat", b"the mat")]
    >>> arguments = TrainingArguments(
    ...     "out", max_steps=3, use_cpu=True, report_to="none", save_strategy="no"
    ... )
    >>> callback = TrajectoryCallback("run.zarr")
    >>> trained = Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
    {'train_runtime': ...}
    Recorded 4 rows to ...run.zarr
    >>> from trajstore import open_run
    >>> open_run("run.zarr").grad.shape
    (4, 128, 8)
    """

    @takes_options
    def __init__(
        self,
        path: RunPath,
        variables: str | Sequence[str] = RecordingOptions.variables,
        *,
        on_step: Callable[[Recorder], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        log: Callable[[dict[str, float]], Any] | bool | None = None,
        **options: Any,
    ) -> None:
        """Store the options, and check that they can be recorded to `path`.

        Parameters
        ----------
        path : path-like
            Path of the run, by custom ``NAME.zarr``. An existing run can be resumed
            (``resume=True``) if the Trainer itself resumes from its own checkpoint.
        on_step : callable, optional
            Called with the `Recorder` after every optimizer step.
        on_note : callable, optional
            Called with each note about the optimizer's types and about the tokens; default: notes
            are logged.
        log : callable or True, optional
            As in `RecordingOptions`. True uses `Trainer.log`, so the numbers appear in the trackers
            of ``report_to``, each at its own step; it is called in the training's thread, after
            the next step.
        **options
            Options of `RecordingOptions`.
        """
        self._path = path
        self._logged: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()
        self._trainer: weakref.ref[Trainer] | None = None
        feed = self._logged.put if log is True else log or None
        self._options = RecordingOptions(variables=variables, log=feed, **options)
        self._logs_to_trainer = log is True
        self._options.check_path(path)
        self._on_step = on_step
        self._on_note = on_note
        self._thread = 0
        self.recorder: Recorder | None = None
        self.comparison: Comparison | None = None
        self.prints_end = True
        listener = functools.partial(_run_and_close_if_failed, weakref.ref(self))
        weakref.finalize(self, _TRAIN.listen(listener).remove).atexit = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        model: torch.nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """Attach to the model and the optimizer, and take the initial state."""
        if args.n_gpu > 1:
            raise RecordingError(
                f"this Trainer splits each batch over {args.n_gpu} GPUs in one process "
                "(DataParallel), which cannot be recorded; start one process per GPU with "
                "torchrun, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        _close_failed(self._path)
        if self.recorder is not None and self.recorder.rows and not self._options.overwrite:
            raise RecordingError(
                "this callback has recorded a run already; create a new callback for each run, "
                "or pass overwrite=True if the Trainer starts again (auto_find_batch_size)"
            )
        if self._logs_to_trainer and self._trainer is None:
            raise RecordingError(
                f"log: got True, but {type(self).__name__} knows only a Trainer that trains by "
                "Trainer.train; pass a callable, such as log=trainer.log"
            )
        loop = TrainingLoop(
            scaler=getattr(optimizer, "scaler", None),  # from accelerate's wrapper
            max_grad_norm=args.max_grad_norm or 0.0,
            first_step=state.global_step,
            device=args.device,
            schedule={
                "name": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                "warmup_steps": args.get_warmup_steps(state.max_steps),
                "steps": state.max_steps,
                "max_grad_norm": args.max_grad_norm or 0.0,
            },
            examples=args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * args.world_size,
        )
        options = self._options
        facts = facts_of_trainer(
            model,
            find_parameters(model, JoinedOptimizer(optimizer), options.parameter),
            options.resumed_or_new(run_paths(self._path, options)),
            data_loader=kwargs.get("train_dataloader"),
            tokenizer=kwargs.get("processing_class"),
            processes=args.world_size,
        )
        self.recorder = open_recorder(
            model,
            optimizer,
            self._path,
            facts.added_to(options),
            loop,
            on_step=self._on_step,
            on_note=self._on_note,
            comparison=self.comparison,
        )
        if state.is_world_process_zero:
            report_notes(facts.notes, self._on_note)
        # A subclass may train without `Trainer.train`. Then complete rows are committed when
        # another callback starts or resumes the run, and at the latest when the interpreter exits.
        self._thread = threading.get_ident()
        _recording.add(self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Pass the numbers of new rows to `Trainer.log`, and commit as `on_epoch_end` does."""
        self._feed_trainer()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Commit all rows up to a checkpoint, before the Trainer writes it."""
        if control.should_save:
            self.on_save()

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        """Commit all rows up to a checkpoint, also one that another callback has asked for."""
        if self.recorder is not None and self.recorder.is_recording:
            self.recorder.commit()

    def _feed_trainer(self) -> None:
        """Pass the numbers of rows that were committed since to `Trainer.log`, at their steps."""
        trainer = None if self._trainer is None else self._trainer()
        while trainer is not None and not self._logged.empty():
            numbers, step = self._logged.get(), trainer.state.global_step
            own = next(number for name, number in numbers.items() if name.endswith("/step"))
            try:
                trainer.state.global_step = int(own)  # where each tracker looks for it
                trainer.log(numbers)
            finally:
                trainer.state.global_step = step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Commit the remaining rows, mark the run complete, and print its path."""
        self.close(complete=True)
        self._feed_trainer()
        recorder = self.recorder
        printed = self.prints_end and state.is_world_process_zero
        if printed and recorder is not None and not recorder.has_failed:
            for path, rows in recorder.recorded_rows():
                print(f"Recorded {rows:,} rows to {path}")

    def close(self, *, complete: bool = False) -> None:
        """Stop recording and commit all complete rows; further calls have no effect.

        Parameters
        ----------
        complete : bool
            Mark the run ``complete`` instead of ``interrupted``.
        """
        _recording.discard(self)
        if self.recorder is not None:
            self.recorder.close(complete=complete)


def _run_and_close_if_failed(
    reference: weakref.ref[TrajectoryCallback], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `Trainer.train`; if it fails, commit the rows of the recording that it has begun."""
    if (callback := reference()) is not None and callback in args[0].callback_handler.callbacks:
        callback._trainer = weakref.ref(args[0])
    is_inside = callback is None or callback in _recording  # another training runs this one
    try:
        return run(*args, **kwargs)
    except BaseException as error:
        if callback is not None and not is_inside and callback._thread == threading.get_ident():
            try:
                callback.close()
            except Exception as failure:
                error.add_note(f"The recording ended with: {failure}")
        raise


def _close_failed(path: RunPath) -> None:
    """Close earlier recordings to a path by this thread; their training runs must have failed."""
    place, thread = os.path.realpath(str(path)), threading.get_ident()
    for other in list(_recording):
        if other._thread == thread and os.path.realpath(str(other._path)) == place:
            other.close()
