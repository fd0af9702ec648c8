"""The state of a training run after a step: everything that the next optimizer step depends on.

It comes from a training between two steps, from a row that holds everything, or from a file: a
checkpoint. The random states are no part of it, because the models have no dropout. The position in
the data follows from the step.

A file is in the format safetensors: tensors, and one JSON text in its metadata with everything
else. Reading a file never executes its contents: the format has no code, and nothing is unpickled.
The text has the type, shape and crc32c of every tensor, and a crc32c of its own. So a damaged file
raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import google_crc32c
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.optim import Optimizer

from trajstore.errors import FormatError
from trajstore.installation import __version__
from trajstore.schema import KEPT, KEYFRAMES, kept_as
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.atomic import put
from trajstore.store.storage.remote_path import METADATA_KEY, Location, local_file
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.replays.recorded_rows import tensor_of
from trajstore.trainers.rounded_optimizer import RoundedSGD
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.step_state import RunParameters, has_keyframes, state_dicts_at
from trajstore.values.optimizer_rule import MOMENTUM

_FORMAT = 3

_MODEL, _OPTIMIZER = "model.", "optimizer."
_MOMENTS = ("exp_avg", "exp_avg_sq", "params_exp_avg", "params_exp_avg_sq", "params_count")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """State of a training run after an optimizer step.

    Attributes
    ----------
    run : str
        Creation time of the run, which distinguishes it from another run with the same name.
    step : int
        Optimizer steps taken.
    rows : int
        Rows of the run so far, without a last row that exists only because training ended.
    config : dict
        Configuration of the run.
    sources : dict of str to str
        Given paths of the text and the tokenizer.
    state : dict
        JSON values of the schedule, which does not count skipped steps, and of the gradient scaler.
    tensors : dict of str to tensor
        Parameters and the optimizer's state, on the CPU; tied weights once.
    name : str
        Name of the run's folder; may be empty.
    """

    run: str
    step: int
    rows: int
    config: dict[str, Any]
    sources: dict[str, str]
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    name: str = ""

    @classmethod
    def take(
        cls,
        training: Training,
        scaler: Any,
        recorder: Recorder,
        *,
        run: str,
        name: str,
        sources: Mapping[str, str],
    ) -> Self:
        """Copy the state of a training.

        Parameters
        ----------
        training : Training
        scaler : GradScaler or None
            Scaler of the loop.
        recorder : Recorder
            Its step and rows are those of the state.
        run, name, sources
            As the attributes.
        """
        tensors = {
            _MODEL + key: _copy(parameter) for key, parameter in training.model.named_parameters()
        }
        for number, values in training.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                tensors[f"{_OPTIMIZER}{number}.{key}"] = _copy(value)
        return cls(
            run=run,
            name=name,
            step=recorder.step,
            rows=recorder.rows,
            config=training.config.model_dump(mode="json"),
            sources=dict(sources),
            state={
                "schedule": {"last_epoch": training.schedule.last_epoch},
                "scaler": None if scaler is None else scaler.state_dict(),
            },
            tensors=tensors,
        )

    @classmethod
    def from_row(
        cls, run: Location, step: int, config: RunConfig, *, sources: Mapping[str, str]
    ) -> Self:
        """Read the state from a row.

        Parameters
        ----------
        run : Path or RemotePath
            A run for which `holds_state` is true, or one with keyframes.
        step : int
            A keyframe, if it has some.
        config : RunConfig
            Configuration of the step.
        sources : mapping of str to str
            As the attribute.

        Raises
        ------
        StepNotFound
            If the run does not hold the step.
        FormatError
            If a keyframe does not fit its digests.
        """
        stored = RunParameters(run)
        row = stored.row(step, stored.variables())
        stored.check_keyframe(step, row)
        tensors = {
            _MODEL + parameter.name: tensor_of(parameter.bits(row), parameter.native)
            for parameter in stored.parameters
        }
        (saved,) = state_dicts_at(run, step)
        for number, values in saved["state"].items():
            tensors |= {f"{_OPTIMIZER}{number}.{key}": value for key, value in values.items()}
        every, steps = config.recording.every, stored.all_steps
        regular = (steps % every == 0) | (np.arange(steps.size) == 0)
        taken, scaler = _scaler_after(stored, step)
        return cls(
            run=str(stored.attributes["created"]),
            name=run.name,
            step=step,
            rows=int(np.count_nonzero(regular & (steps <= step))),
            config=config.model_dump(mode="json"),
            sources=dict(sources),
            state={"schedule": {"last_epoch": taken}, "scaler": scaler},
            tensors=tensors,
        )

    def apply(self, training: Training, scaler: Any) -> None:
        """Set a new training to this state.

        Weights are converted to the types of the model, and the optimizer's state to the types that
        the optimizer loads. Hyperparameters and learning rates are those of the training's
        configuration.

        Parameters
        ----------
        training : Training
            It is changed in place: its parameters remain the same objects.
        scaler : GradScaler or None
            Scaler of the loop.

        Raises
        ------
        FormatError
            If the state belongs to another model.
        """
        self._set_weights(training.model)
        optimizer, schedule = training.optimizer, training.schedule
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": self._optimizer_values(), "param_groups": groups})
        steps = self.state["schedule"]["last_epoch"]
        _count_steps(optimizer, float(steps))
        rates = [
            base * factor(steps)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        reached = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
        schedule.load_state_dict(schedule.state_dict() | reached)
        if scaler is not None and self.state["scaler"]:
            scaler.load_state_dict(self.state["scaler"])
        if training.batches is not None:
            training.batches.skip(self.step * training.config.training.accumulation)

    def save(self, path: Location, *, fsync: bool = True) -> int:
        """Write to a file atomically.

        Returns
        -------
        int
            Bytes written.
        """
        described = {name: _description(tensor) for name, tensor in self.tensors.items()}
        text = json.dumps(vars(self) | {"format": _FORMAT, "tensors": described})
        metadata = {"trajstore": text, "crc32c": str(google_crc32c.value(text.encode()))}
        return put(path, [save(self.tensors, metadata)], fsync=fsync)

    @classmethod
    def load(cls, path: Location) -> Self:
        """Read a file.

        Raises
        ------
        FormatError
            If the file is not a checkpoint, is truncated, or is damaged.
        """
        fields, tensors = _read(path)
        described = fields.pop("tensors")
        if described.keys() != tensors.keys():
            raise _damaged(path, "its tensors differ from its list of tensors")
        for name, tensor in tensors.items():
            if _description(tensor) != described[name]:
                raise _damaged(path, f"the checksum of {name} is wrong")
        number = fields.pop("format")
        if number != _FORMAT:
            raise FormatError(
                f"{path} has checkpoint format {number}, and trajstore {__version__} reads format "
                f"{_FORMAT}; resume the run with the version that recorded it"
            )
        return cls(**fields, tensors=tensors)

    @torch.no_grad()
    def _set_weights(self, model: torch.nn.Module) -> None:
        current = {_MODEL + name: tensor for name, tensor in model.named_parameters()}
        saved = {name for name in self.tensors if name.startswith(_MODEL)}
        for name in sorted(saved ^ current.keys()):
            raise FormatError(
                f"the state belongs to another model: {name} is only in "
                f"{'the state' if name in saved else 'the model'}; use the versions of torch and "
                "transformers that recorded the run"
            )
        for name, tensor in current.items():
            if tensor.shape != self.tensors[name].shape:
                raise FormatError(
                    f"the state belongs to another model: {name} has shape "
                    f"{tuple(self.tensors[name].shape)} there, expected {tuple(tensor.shape)}"
                )
            tensor.copy_(self.tensors[name])

    def _optimizer_values(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the state of each parameter by its number, as in an optimizer's state dict."""
        values: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(_OPTIMIZER):
                _, number, key = name.split(".", 2)
                values.setdefault(int(number), {})[key] = tensor
        return values

    def without_optimizer(self) -> dict[str, torch.Tensor]:
        """Return the tensors without the optimizer's state."""
        return {k: tensor for k, tensor in self.tensors.items() if not k.startswith(_OPTIMIZER)}


def _scaler_after(stored: RunParameters, step: int) -> tuple[int, dict[str, Any] | None]:
    """Return the steps that were not skipped, and the state of the gradient scaler, if any."""
    if not (stored.has_keyframes and "scale" in stored and step):
        return step, None
    group: Any = open_group(stored.run)
    skipped = group["skipped"][...][stored.all_steps <= step][1:].astype(bool).tolist()
    scaler = torch.amp.GradScaler("cpu").state_dict()
    scale, tracker = float(group["scale"][1]), 0
    for is_skipped in skipped:  # the rule of `GradScaler.update`
        tracker = 0 if is_skipped else (tracker + 1) % scaler["growth_interval"]
        if is_skipped or not tracker:
            scale *= scaler["backoff_factor" if is_skipped else "growth_factor"]
    return step - sum(skipped), scaler | {"scale": scale, "_growth_tracker": tracker}


def rows_hold_state(config: RunConfig, variables: Collection[str]) -> bool:
    """Return True if each row holds the whole state of a training run.

    Rows lack the growth of a gradient scaler.

    Parameters
    ----------
    config : RunConfig
    variables : collection of str
        Recorded variables.
    """
    if "params" not in variables:
        return False
    if config.training.autocast == "float16":
        return False
    if config.optimizer.name == "sgd":
        momentum = (KEPT.name, *kept_as(MOMENTUM, "element"))
        state_names: tuple[str, ...] = momentum if config.optimizer.momentum else ()
    else:
        state_names = _MOMENTS
    return {"W", "params_lr", *state_names} <= set(variables)


def holds_state(run: Location, config: RunConfig) -> bool:
    """Return True if each row of an existing run, or its keyframes, hold the whole state."""
    group = open_group(run)
    if has_keyframes(group.attrs.asdict()):
        return (run / KEYFRAMES / METADATA_KEY).exists()
    return "parameters" in group.attrs and rows_hold_state(config, tuple(group.array_keys()))


def stored_name(path: Location) -> str:
    """Return the name of the run in a file, without its tensors.

    Raises
    ------
    FormatError
        If the file is damaged.
    """
    return str(_read(path, with_tensors=False)[0].get("name", ""))


def _count_steps(optimizer: Optimizer, count: float) -> None:
    """Set the step count of SGD with stochastic rounding, on which its numbers depend.

    SGD keeps no count, and a run or the source of a fork may have none or an old one. A replay
    counts from the first row. Other optimizers stay unchanged.
    """
    if not isinstance(optimizer, RoundedSGD):
        return
    for group in optimizer.param_groups:
        if group["rounding"] == "stochastic":
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = torch.tensor(count, device="cpu")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _description(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return {
        "dtype": type_name(tensor.dtype),
        "shape": list(tensor.shape),
        "crc32c": google_crc32c.value(data.tobytes()),
    }


def _read(
    path: Location, *, with_tensors: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the JSON text of a file, and its tensors."""
    try:
        with local_file(path) as local, safe_open(local, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            names = file.keys() if with_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    text = metadata.get("trajstore", "")
    if metadata.get("crc32c") != str(google_crc32c.value(text.encode())):
        raise _damaged(path, "the checksum of its description is wrong")
    return json.loads(text), tensors


def _damaged(path: Location, fault: str) -> FormatError:
    return FormatError(
        f"the checkpoint {path} is damaged: {fault}; remove it, and resume from an older one or, "
        "without one, by repeating the recorded steps"
    )
