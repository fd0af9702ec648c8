"""Recording of any Hugging Face `Trainer`, by one callback."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainers.attachment import Recording
from trainers.forward import LogitsMode
from trainers.recorder import Recorder
from trainers.tokens import Tokens
from trajstore.errors import RecordingError
from trajstore.layout import DEFAULT_MEMORY

__all__ = ["TrajectoryCallback"]


class TrajectoryCallback(TrainerCallback):
    """Records a parameter of the trained model at every optimizer step.

    Gradient accumulation, clipping, mixed precision and distributed training are those of the
    Trainer; the first process records.

    Parameters
    ----------
    path, record, parameter, every, tokens, logits_mode
        See `trainers.attachment.Recording`.
    is_dead, token_count, token_text, config, origin, memory, block_rows, encoding, overwrite
        Likewise.
    resume : bool
        Go on with the run that is at `path`, when the Trainer itself resumes from a checkpoint of
        its own: rows past that step are dropped.
    fsync, schedule
        See `trainers.attachment.Recording`.
    on_step : callable, optional
        Called with the `Recorder` after every optimizer step.

    Raises
    ------
    RunExists
        If something is at `path`, and `resume` is not set.
    RunNotFound
        If `resume` is set, and there is no run.

    Examples
    --------
    >>> trainer = Trainer(..., callbacks=[TrajectoryCallback("run.zarr")])   # doctest: +SKIP
    >>> trainer.train()                                                      # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record: str | Sequence[str] = "all",
        *,
        parameter: str | Sequence[str] | None = None,
        every: int = 1,
        tokens: Tokens = "all",
        logits_mode: LogitsMode = "last",
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
        fsync: bool = False,
        schedule: Mapping[str, Any] | None = None,
        on_step: Callable[[Recorder], None] | None = None,
    ) -> None:
        self._recording = Recording(
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
        self._on_step = on_step
        self.recorder: Recorder | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
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
        if self.recorder is not None:
            raise RecordingError("this callback has recorded a run already; make a new one")
        schedule = {
            "name": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "steps": state.max_steps,
            "max_grad_norm": args.max_grad_norm,
        }
        self.recorder = self._recording.attach(
            model,
            optimizer,
            device=args.device,
            schedule=schedule,
            scaler=getattr(optimizer, "scaler", None),  # of accelerate's wrapper
            max_grad_norm=args.max_grad_norm or 0.0,
            # The Trainer multiplies a loss that was averaged over all processes' tokens.
            loss_scale=args.world_size if args.average_tokens_across_devices else 1.0,
            first_step=state.global_step,
            on_step=self._on_step,
        )
        # The Trainer tells no callback that it failed: what is whole is committed at the latest
        # when the interpreter ends.
        atexit.register(self.close)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Commit what is left, and mark the run complete."""
        self.close(complete=True)

    def close(self, *, complete: bool = False) -> None:
        """Stop recording and commit every whole row; twice does no harm.

        Parameters
        ----------
        complete : bool
            Mark the run ``complete``, not ``interrupted``.
        """
        atexit.unregister(self.close)
        if self.recorder is not None:
            self.recorder.close(complete=complete)
