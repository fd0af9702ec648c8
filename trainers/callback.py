"""Recording of any Hugging Face `Trainer`, by one callback."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainers.capture import Recorder
from trainers.provenance import optimizer_attributes, provenance
from trajstore.errors import RecordingError
from trajstore.layout import DEFAULT_MEMORY
from trajstore.schema import resolve_record
from trajstore.writer import RunWriter, check_target

__all__ = ["TrajectoryCallback"]


class TrajectoryCallback(TrainerCallback):
    """Records the unembedding matrix of the trained model at every optimizer step.

    Parameters
    ----------
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    record : str or sequence of str
        Variables, or tiers of them: ``weights``, ``weights+grads``, ``all``.
    is_dead, token_count, token_text : array_like, (token,), optional
        What is known about the vocabulary.
    config, origin : mapping, optional
        JSON values for the root attributes: how to run it again, and what to add to its
        provenance, such as the identity of the text.
    memory : int or str, default 1 GiB
        For all buffers of the recorder together.
    block_rows : int, optional
        Rows of a block.
    overwrite : bool
        Replace a run that is there.
    on_step : callable, optional
        Called with the `Recorder` after every optimizer step.

    Raises
    ------
    RunExists
        If something is at `path`.

    Examples
    --------
    >>> trainer = Trainer(..., callbacks=[TrajectoryCallback("run.zarr")])   # doctest: +SKIP
    >>> trainer.train()                                                      # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record: str | tuple[str, ...] = "all",
        *,
        is_dead: npt.ArrayLike | None = None,
        token_count: npt.ArrayLike | None = None,
        token_text: npt.ArrayLike | None = None,
        config: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        block_rows: int | None = None,
        overwrite: bool = False,
        on_step: Callable[[Recorder], None] | None = None,
    ) -> None:
        self._path = check_target(path, overwrite=overwrite)
        self._variables = resolve_record(record)
        self._coordinates = {
            "is_dead": is_dead,
            "token_count": token_count,
            "token_text": token_text,
        }
        self._config = config
        self._origin = origin
        self._options: dict[str, Any] = {
            "memory": memory,
            "block_rows": block_rows,
            "overwrite": overwrite,
        }
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
        _check_supported(args)
        if self.recorder is not None:
            raise RecordingError("this callback has recorded a run already; make a new one")
        real = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        schedule = {
            "name": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "steps": state.max_steps,
            "max_grad_norm": args.max_grad_norm,
        }

        def create(types: dict[str, str]) -> RunWriter:
            assert self.recorder is not None
            tokens, hidden = self.recorder.parameter.shape
            return RunWriter.create(
                self._path,
                token=np.arange(tokens, dtype=np.int32),
                hidden=hidden,
                variables=types,
                config=self._config,
                attributes={
                    "optimizer": optimizer_attributes(real, self.recorder.param_group, schedule),
                    "provenance": provenance(args.device, self._origin),
                },
                **self._coordinates,
                **self._options,
            )

        self.recorder = Recorder(
            model,
            real,
            variables=self._variables,
            create=create,
            first_step=state.global_step,
        )
        # The Trainer tells no callback that it failed: what is whole is committed at the latest
        # when the interpreter ends.
        atexit.register(self.close)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the recorder what the Trainer has just clipped to."""
        assert self.recorder is not None
        self.recorder.before_clipped_step(args.max_grad_norm or 0.0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report progress."""
        if self._on_step is not None and self.recorder is not None:
            self._on_step(self.recorder)

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


def _check_supported(args: TrainingArguments) -> None:
    limits = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, 1),
        "world_size": (args.world_size, 1),
        "n_gpu": (max(args.n_gpu, 1), 1),
        "fp16": (args.fp16, False),
    }
    for name, (value, supported) in limits.items():
        if value != supported:
            raise RecordingError(
                f"{name} is {value}, and only {supported} can be recorded so far; "
                "train with that, or without this callback"
            )
