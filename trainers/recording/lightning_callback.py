"""A callback that records the training of a Lightning `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.capture import Recorder, attach
from trajstore.trainers.recording.options import RecordingOptions, takes_options


class LightningCallback(Callback):
    """Records a parameter of a LightningModule at every optimizer step.

    Accumulation, clipping, mixed precision and manual optimization work as in the Trainer; the
    first process records. After an exception the run keeps all complete rows.

    Attributes
    ----------
    recorder : Recorder or None
        None until the training starts.

    Raises
    ------
    RunExists
        If `path` exists, and neither `resume` nor `overwrite` is set.

    Examples
    --------
    >>> import torch
    >>> from lightning.pytorch import Trainer
    >>> class Pairs(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
    ...     def training_step(self, ids, number):
    ...         return torch.nn.functional.cross_entropy(self.head(self.embedding(ids)), ids)
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters())
    >>> trainer = Trainer(
    ...     max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
    ...     enable_progress_bar=False, enable_model_summary=False,
    ...     callbacks=[LightningCallback("run.zarr", parameter="head.weight")],
    ... )
    >>> trainer.fit(Pairs(), torch.tensor([[0, 1, 4], [2, 3, 4]]))
    Recorded 4 rows to ...run.zarr
    >>> from trajstore import open_run
    >>> open_run("run.zarr").grad.shape
    (4, 5, 3)
    """

    @takes_options
    def __init__(
        self,
        path: RunPath,
        variables: str | Sequence[str] = RecordingOptions.variables,
        *,
        module: str = "",
        on_step: Callable[[Recorder], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Store the options, and check that they can be recorded to `path`.

        Parameters
        ----------
        path : path-like
            Path of the run, by custom ``NAME.zarr``. An existing run can be resumed
            (``resume=True``) if ``Trainer.fit`` gets the checkpoint as ``ckpt_path``.
        module : str
            Name of the attribute of the LightningModule that holds the recorded model, such as
            ``model``. Names of parameters are those in this model. Default: the LightningModule.
        on_step : callable, optional
            Called with the `Recorder` after every optimizer step.
        on_note : callable, optional
            Called with each note; default: notes are logged.
        **options
            Options of `RecordingOptions`.
        """
        RecordingOptions(variables=variables, **options).check_path(path)
        self._path, self._module = path, module
        self._options = dict(variables=variables, on_step=on_step, on_note=on_note, **options)
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model and the optimizers, and take the initial or restored state."""
        optimizers = trainer.optimizers
        clips_norm = trainer.gradient_clip_algorithm != "value"
        self.recorder = attach(
            pl_module.get_submodule(self._module),
            optimizers[0] if len(optimizers) == 1 else optimizers,
            self._path,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            max_grad_norm=trainer.gradient_clip_val if clips_norm else None,
            # Lightning counts the steps of all optimizers.
            first_step=trainer.global_step // max(1, len(optimizers)),
            **self._options,
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take the batch as the inputs of its forward passes; `training_step` gets it, too."""
        if self.recorder is not None:
            named = batch if isinstance(batch, Mapping) else {"batch": batch}
            self.recorder.observe(inputs=named)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Commit all rows up to a checkpoint, before Lightning writes it."""
        if self.recorder is not None and self.recorder.is_recording:
            self.recorder.commit()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the remaining rows, mark the run complete, and print its path."""
        if (recorder := self.recorder) is None:
            return
        recorder.close()
        if trainer.is_global_zero and not recorder.has_failed:
            for path, rows in recorder.recorded_rows():
                print(f"Recorded {rows:,} rows to {path}")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Commit all complete rows, and mark the run interrupted."""
        if self.recorder is not None:
            self.recorder.__exit__(type(exception), exception, exception.__traceback__)
