"""Steps of a Hugging Face Trainer, trained again from the rows before them.

The Trainer itself repeats them, with the recorded arguments and the data set given again. Learning
rates and random states are those of the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trajstore.errors import InvalidArgument
from trajstore.schema import VARIABLES
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.recording.compared_run import Comparison
from trajstore.trainers.recording.hf_callback import TrajectoryCallback
from trajstore.trainers.recording.step_hooks import real_optimizer
from trajstore.trainers.recording.torch_threads import torch_threads
from trajstore.trainers.recording.trainer_facts import class_name
from trajstore.trainers.replay.recorded_optimizer import optimizer_of_groups
from trajstore.trainers.replay.replay_device import ReplayDevice
from trajstore.trainers.runs.given_data_set import given_data_set
from trajstore.trainers.runs.retraining import Retrained
from trajstore.trainers.runs.training_setup import QUIET, train_after
from trajstore.trainers.step_models.optimizer_state import state_of
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.restore import restore_from, set_generators
from trajstore.trainers.step_models.step_model import Constructor, StepModel

__all__ = ["GIVEN", "RepeatedTrainer"]

GIVEN = ("lr", "params_lr", "random_state")
"""Variables that are taken from the rows, so the repetition proves nothing about them."""

_SAMPLERS = (
    "accelerate.data_loader.SeedableRandomSampler", "torch.utils.data.sampler.SequentialSampler",
)  # fmt: skip
_COLLATOR = "transformers.data.data_collator.default_data_collator"


class RepeatedTrainer:
    """Trains recorded steps of a Trainer again.

    Parameters
    ----------
    run : Path or RemotePath
    facts : mapping
        From `trainer_facts`.
    device : ReplayDevice
    data_set : path-like or object
        As for `given_data_set`.
    collator : callable, optional
        The Trainer's; default: that of transformers.
    constructor : callable, optional
        As for `model_at`.

    Attributes
    ----------
    notes : tuple of str

    Raises
    ------
    InvalidArgument
        If the run cannot be repeated.
    VariableNotRecorded
        If its rows do not hold the whole state.
    CorpusError
        If the data set differs from the recorded one.
    """

    def __init__(
        self,
        run: Location,
        facts: Mapping[str, Any],
        device: ReplayDevice,
        data_set: Any,
        collator: Any = None,
        constructor: Constructor | None = None,
    ) -> None:
        self._run, self._facts, self._device = run, facts, device
        self._stored = RunParameters(run)
        self._constructor = constructor
        self._collator = collator
        _check_repeatable(run, facts, collator)
        state_of(self._stored, int(self._stored.steps[0]))  # an error if the rows lack the state
        self._held = tuple(name for name in VARIABLES if name in self._stored)
        recorded = facts["data_set"]
        self._data_set = given_data_set(data_set, recorded, with_index="batch" in self._held)
        self.notes: tuple[str, ...] = ("learning rates and random states are those of the rows",)
        if "sha256" not in recorded:
            self.notes += (
                f"the run has no fingerprint of its data set, a {recorded['class']}, because "
                "reading it could have changed the training; another data set gives differences",
            )
        for entry in self._stored.attributes["provenance"].get("resumed", []):
            self.notes += (
                f"the run was resumed after step {entry['step']}; the following steps are repeated "
                "with the arguments of its first training",
            )

    def train(self, before: int, last: int) -> Retrained:
        """Train from the row of a step up to the last step, or the first different row."""
        model = StepModel(self._stored, self._constructor).module
        if self._facts["attention"] and isinstance(model, transformers.PreTrainedModel):
            try:
                model.set_attn_implementation(self._facts["attention"])
            except (ImportError, ValueError) as error:
                raise InvalidArgument(
                    f"the run was trained with the attention {self._facts['attention']}, which "
                    f"cannot be used here ({error}); repeat it on a machine that has it"
                ) from error
        if self._facts["loss_type"]:
            model.loss_type = self._facts["loss_type"]
        recording, comparison = self._stored.attributes["recording"], Comparison()
        trajectory = TrajectoryCallback(
            self._run,
            self._held,
            parameter=recording["parameter"],
            every=recording["every"],
            logits_mode=recording["logits_mode"],
            resume=True,
        )
        trajectory.comparison, trajectory.prints_end = comparison, False
        optimizer = self._optimizer(model)
        with tempfile.TemporaryDirectory(prefix="trajstore-") as scratch:
            trainer = Trainer(
                model=model,
                args=self._arguments(scratch),
                data_collator=self._collator,
                train_dataset=self._data_set,
                optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
                callbacks=[_FromRows(self._stored, last, comparison), trajectory],
            )
            try:
                with torch_threads(self._device.threads):
                    train_after(trainer, before, scratch)
            finally:
                trajectory.close()
        return Retrained(
            agreed=comparison.agreed, checkpoint=None, difference=comparison.difference
        )

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = self._stored.attributes["optimizer"]["groups"]
        named = dict(model.named_parameters(remove_duplicate=False))
        members = [
            [named[one.name] for one in self._stored.parameters if one.group == number]
            for number in range(len(groups))
        ]
        return optimizer_of_groups(groups, members)

    def _arguments(self, scratch: str) -> TrainingArguments:
        schedule = self._stored.attributes["optimizer"]["schedule"]
        try:
            return TrainingArguments(
                output_dir=scratch,
                max_steps=schedule["steps"],
                data_seed=self._facts["order"]["seed"],
                use_cpu=self._device.device.type == "cpu",
                **self._facts["arguments"],
                **QUIET,
            )
        except (TypeError, ValueError) as error:
            version = self._stored.attributes["provenance"]["transformers"]
            raise InvalidArgument(
                f"transformers {transformers.__version__} refuses the recorded arguments of the "
                f"Trainer ({error}); install transformers {version}, or repeat "
                "the steps on the kind of device that recorded them"
            ) from error


class _FromRows(TrainerCallback):
    """Restores the state of a row, and before each step its learning rates and random state."""

    def __init__(self, stored: RunParameters, last: int, comparison: Comparison) -> None:
        self._stored, self._last, self._comparison = stored, last, comparison

    def on_train_begin(
        self, args: Any, state: TrainerState, *_: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        restore_from(self._stored, model, real_optimizer(optimizer), step=state.global_step)

    def on_step_begin(
        self, args: Any, state: TrainerState, *_: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        rates = self._stored.value("params_lr", step).tolist()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if "random_state" in self._stored:  # the last one, because the Trainer has drawn the data
            set_generators(model, self._stored.value("random_state", step))

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= self._last or self._comparison.difference is not None:
            control.should_training_stop = True


def _check_repeatable(run: Location, facts: Mapping[str, Any], collator: Any) -> None:
    """Check that nothing of the training is unknown.

    Raises
    ------
    InvalidArgument
        If something is.
    """
    used = class_name(collator) if collator is not None else _COLLATOR
    own = "; restore the row before a step in your program, and train the step there: restore()"
    reason = None
    if facts["processes"] > 1:
        reason = f"it was trained by {facts['processes']} processes, and one repeats it{own}"
    elif facts["custom"]:
        reason = f"its Trainer has its own {', '.join(facts['custom'])}, not in the run{own}"
    elif facts["order"]["sampler"] not in _SAMPLERS or facts["arguments"].get("ignore_data_skip"):
        reason = (
            f"the order of its examples is not that of a seed: {facts['order']['sampler']}; train "
            "with the Trainer's own random or sequential order"
        )
    elif facts["arguments"].get("fp16"):
        reason = "its rows lack the growth of the gradient scaler; train with bf16"
    elif used != facts["collator"]:
        reason = (
            f"its Trainer has the collator {facts['collator']}, got {used}; pass the same one in "
            "Python: prove_steps(…, dataset=…, collator=…)"
        )
    if reason is not None:
        raise InvalidArgument(f"the training of {run} cannot be repeated: {reason}")
