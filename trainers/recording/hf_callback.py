"""A callback that records the training of a Hugging Face `Trainer`."""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from trajstore.errors import RecordingError
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.capture import open_recorder
from trajstore.trainers.recording.compared_run import Comparison
from trajstore.trainers.recording.data_set_tokens import facts_of_trainer
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.trainers.recording.numeric_advice import report_notes
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, takes_options
from trajstore.trainers.recording.parameters import find_parameters
from trajstore.trainers.recording.planned_run import run_paths
from trajstore.trainers.recording.step_hooks import Recorder
from trajstore.trainers.recording.watched_calls import WatchedCall

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
            of ``report_to``; it is called in the training's thread, after the next step.
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
                "this callback has recorded a run already; create a new callback for each run, or "
                "pass overwrite=True if the Trainer starts again (auto_find_batch_size)"
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
                "max_grad_norm": args.max_grad_norm,
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

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Pass the numbers of rows that were committed since to `Trainer.log`."""
        trainer = None if self._trainer is None else self._trainer()
        while trainer is not None and not self._logged.empty():
            trainer.log(self._logged.get())

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        """Commit all rows up to a checkpoint of the Trainer."""
        if self.recorder is not None:
            self.recorder.commit()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Commit the remaining rows, mark the run complete, and print its path."""
        self.close(complete=True)
        self.on_step_end()
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
