"""Recording of any Hugging Face `Trainer`, by one callback."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from trajstore.errors import RecordingError
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.capture import attach
from trajstore.trainers.recording.compared_run import Comparison
from trajstore.trainers.recording.data_set_tokens import facts_of_trainer
from trajstore.trainers.recording.numeric_advice import report_notes
from trajstore.trainers.recording.options import RecordingOptions, TrainingLoop, takes_options
from trajstore.trainers.recording.parameters import find_parameters
from trajstore.trainers.recording.step_hooks import Recorder, real_optimizer

__all__ = ["TrajectoryCallback"]

_recording: weakref.WeakSet[TrajectoryCallback] = weakref.WeakSet()
"""Callbacks whose training has begun, and not ended as far as they know."""


class TrajectoryCallback(TrainerCallback):
    """Records a parameter of the trained model at every optimizer step.

    Gradient accumulation, clipping, mixed precision and distributed training are those of the
    Trainer; the first process records. Which tokens are dead, how often each occurs, and how it
    reads, is taken from the Trainer's data set and tokenizer where nobody says so, and the data set
    is a list of dicts or a table of Hugging Face datasets, with ``input_ids``, that is counted in
    seconds.

    Attributes
    ----------
    recorder : Recorder or None
        None until the training begins.
    comparison : Comparison or None
        Set before the training begins, each row is compared with that of the run that is there,
        instead of being stored.
    says_end : bool
        Whether a line on standard output says at the end of the training where the run is; set to
        False by what says so itself.

    Raises
    ------
    RunExists
        If something is at `path`, and `resume` is not set.
    RunNotFound
        If `resume` is set, and there is no run.

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
    Recorded 4 rows to run.zarr
    >>> from trajstore import open_run
    >>> open_run("run.zarr").grad.shape
    (4, 128, 8)
    """

    @takes_options
    def __init__(
        self,
        path: RunPath,
        record: str | Sequence[str] = RecordingOptions.record,
        *,
        on_step: Callable[[Recorder], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Take what to record, and insist that it can be made at `path`.

        Parameters
        ----------
        path : path-like
            Where the run will be, by custom ``NAME.zarr``. One that is there can be gone on with
            (``resume=True``) when the Trainer itself resumes from a checkpoint of its own.
        on_step : callable, optional
            Called with the `Recorder` after every optimizer step.
        on_note : callable, optional
            Called with each sentence of advice about the optimizer's types, and about what is known
            of the tokens; logged without it.
        **options
            Of `RecordingOptions`.
        """
        self._path = path
        self._options = RecordingOptions(record=record, **options)
        self._options.check_path(path)
        self._on_step = on_step
        self._on_note = on_note
        self._thread = 0
        self.recorder: Recorder | None = None
        self.comparison: Comparison | None = None
        self.says_end = True

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
                f"this Trainer spreads each batch over {args.n_gpu} GPUs in one process "
                "(DataParallel), which cannot be recorded; start one process a GPU with torchrun, "
                "or show it one GPU with CUDA_VISIBLE_DEVICES"
            )
        _end_failed(self._path)
        if self.recorder is not None:
            raise RecordingError("this callback has recorded a run already; make a new one")
        schedule = {
            "name": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "steps": state.max_steps,
            "max_grad_norm": args.max_grad_norm,
        }
        loop = TrainingLoop(
            scaler=getattr(optimizer, "scaler", None),  # of accelerate's wrapper
            max_grad_norm=args.max_grad_norm or 0.0,
            # The Trainer multiplies a loss that was averaged over all processes' tokens.
            loss_scale=args.world_size if args.average_tokens_across_devices else 1.0,
            first_step=state.global_step,
            device=args.device,
            schedule=schedule,
            examples=args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * args.world_size,
        )
        facts = facts_of_trainer(
            model,
            find_parameters(model, real_optimizer(optimizer), self._options.parameter),
            self._options,
            data_loader=kwargs.get("train_dataloader"),
            tokenizer=kwargs.get("processing_class"),
            processes=args.world_size,
        )
        self.recorder = attach(
            model,
            optimizer,
            self._path,
            facts.added_to(self._options),
            loop,
            on_step=self._on_step,
            on_note=self._on_note,
            comparison=self.comparison,
        )
        if state.is_world_process_zero:
            report_notes(facts.notes, self._on_note)
        # The Trainer tells no callback that it failed: what is whole is committed when the cell of
        # the notebook ends, when another callback begins the run anew or goes on with it, and at
        # the latest when the interpreter ends.
        self._thread = threading.get_ident()
        _recording.add(self)
        atexit.register(self.close)
        _at_end_of_cell(self, register=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any
    ) -> None:
        """Commit what is left, mark the run complete, and print where it is."""
        self.close(complete=True)
        if self.says_end and self.recorder is not None and state.is_world_process_zero:
            for path, rows in self.recorder.recorded_rows():
                print(f"Recorded {rows:,} rows to {path}")

    def close(self, *, complete: bool = False) -> None:
        """Stop recording and commit every whole row; twice does no harm.

        Parameters
        ----------
        complete : bool
            Mark the run ``complete``, not ``interrupted``.
        """
        atexit.unregister(self.close)
        _recording.discard(self)
        _at_end_of_cell(self, register=False)
        if self.recorder is not None:
            self.recorder.close(complete=complete)

    def _after_cell(self, *result: Any) -> None:
        """Close what a training has left that failed in a cell of a notebook."""
        if self._thread == threading.get_ident():
            self.close()


def _end_failed(path: RunPath) -> None:
    """Close what records to a path, and must have failed: its thread begins another training."""
    place, thread = os.path.realpath(str(path)), threading.get_ident()
    for other in list(_recording):
        if other._thread == thread and os.path.realpath(str(other._path)) == place:
            other.close()


def _at_end_of_cell(callback: TrajectoryCallback, *, register: bool) -> None:
    """In a notebook, have `_after_cell` called when a cell ends, or no longer."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    events = shell.events
    if register:
        events.register("post_run_cell", callback._after_cell)
    elif callback._after_cell in events.callbacks.get("post_run_cell", ()):
        events.unregister("post_run_cell", callback._after_cell)
