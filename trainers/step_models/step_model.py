"""The model of a recorded step: built from its recorded configuration, with the step's weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from trajstore.arguments import ANY, checks_types, exact
from trajstore.errors import InvalidArgument
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.step_models.recorded_parameters import Row, RunParameters, StoredParameter
from trajstore.values.native_types import NativeType

Constructor = Callable[[], torch.nn.Module]
"""Builds the model of a run; its weights are replaced."""


@checks_types
def model_at(run: RunPath, step: int, *, constructor: Constructor | None = None) -> torch.nn.Module:
    """Return the model as it was after a step, in evaluation mode, on the CPU.

    Weights and recorded buffers have the recorded bits. Tied weights are tied.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``.
    step : int
        0 is the initial state.
    constructor : callable, optional
        Returns a model of the same architecture, with the same values in buffers that do not
        change. Needed if the run does not record the configuration of a model of transformers.

    Returns
    -------
    Module

    Raises
    ------
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters.
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        If a constructor is needed, or its model has other parameters than the run.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(
    ...     ["training.steps=3", "training.batch_size=4", 'recording.variables=["everything"]']
    ... )
    >>> model = model_at(record(config, "run.zarr"), 3)
    >>> model.lm_head.weight is model.transformer.wte.weight, model.dtype
    (True, torch.bfloat16)
    """
    ((_, model),) = models(run, [step], constructor=constructor)
    return model


def models(
    run: RunPath, steps: Iterable[int] | None = None, *, constructor: Constructor | None = None
) -> Iterator[tuple[int, torch.nn.Module]]:
    """Iterate over the models of many steps. One model is updated in place.

    Each block of rows is read once, so all its steps cost little more than one of them.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``.
    steps : iterable of int, optional
        Recorded steps; the models have increasing steps. Default: all recorded steps.
    constructor : callable, optional
        As for `model_at`.

    Yields
    ------
    step : int
    model : Module
        The same object for every step. Its weights change when the next step is requested.

    Raises
    ------
    RunNotFound, VariableNotRecorded, StepNotFound, InvalidArgument
        As `model_at`.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(
    ...     ["training.steps=3", "training.batch_size=4", 'recording.variables=["everything"]']
    ... )
    >>> path = record(config, "run.zarr")
    >>> norms = {step: model.lm_head.weight.norm().item() for step, model in models(path)}
    >>> list(norms)
    [0, 1, 2, 3]
    """
    stored = RunParameters(run)
    given = stored.steps if steps is None else exact("steps", steps, "int64", least=ANY)
    wanted = np.unique(given).tolist()
    for step in wanted:
        stored.number(step)
    model = StepModel(stored, constructor)
    for step, row in stored.rows(wanted, model.variables):
        model.set(row)
        yield step, model.module


class StepModel:
    """A model whose parameters are set to those of recorded steps.

    Parameters
    ----------
    stored : RunParameters
    constructor : callable, optional

    Attributes
    ----------
    module : Module
        In evaluation mode.
    parameters : list of (StoredParameter, Parameter)
        Each stored parameter with that of the model.
    variables : tuple of str
        Variables that `set` needs.
    """

    def __init__(self, stored: RunParameters, constructor: Constructor | None = None) -> None:
        with torch.random.fork_rng(devices=[]):  # building draws weights, which are replaced
            self.module = _built(stored, constructor)
        self.parameters = _matched(stored, self.module)
        self._buffers = _buffers(stored, self.module)
        self._built = dict(self.module.named_buffers())
        self.variables = (*stored.variables(), *(["buffers"] if self._buffers else []))
        self._set_types()
        for one, tensor in self.parameters:
            tensor.requires_grad_(one.requires_grad)

    def set(self, row: Row) -> None:
        """Set all parameters to those of a row, remove gradients, and set evaluation mode."""
        self._set_types()
        self.copy(row)
        self.module.eval()

    def _set_types(self) -> None:
        """Set the recorded types, also after a user has converted the model."""
        for one, tensor in self.parameters:
            tensor.data = tensor.data.to(getattr(torch, one.native.name))
        for name, built in self._built.items():
            now = self.module.get_buffer(name)
            if now.dtype != built.dtype:
                owner, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(owner), last, built.to(now.device))

    @torch.no_grad()
    def copy(self, row: Row) -> None:
        """Set all parameters and recorded buffers to those of a row, without gradients."""
        for one, tensor in self.parameters:
            tensor.copy_(tensor_of(one.bits(row), one.native))
            tensor.grad = None
        for first, native, name in self._buffers:
            buffer = self.module.get_buffer(name)
            values = row["buffers"][first : first + buffer.numel()]
            buffer.copy_(tensor_of(values, native).view(buffer.shape))


def _built(stored: RunParameters, constructor: Constructor | None) -> torch.nn.Module:
    if constructor is not None:
        model = constructor()
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgument(
                f"the constructor returned {type(model).__name__}, expected a torch.nn.Module"
            )
        return model
    recorded = stored.attributes.get("model_config")
    if not recorded:
        raise InvalidArgument(
            f"{stored.run} does not record the configuration of its model, because it is not one "
            "of transformers; pass constructor=…, a function that returns the model"
        )
    return _of_transformers(recorded, stored.run)


def _of_transformers(recorded: Mapping[str, Any], run: RunPath) -> torch.nn.Module:
    """Return a model of transformers from the attribute ``model_config``.

    Only models of transformers are built, so a file cannot choose what is executed.
    """
    version = recorded.get("transformers")
    kind = getattr(transformers, str(recorded.get("class")), None)
    if not inspect.isclass(kind) or not issubclass(kind, transformers.PreTrainedModel):
        raise InvalidArgument(
            f"{run} records a model of the class {recorded.get('class')}, which transformers "
            f"{transformers.__version__} does not have; pass constructor=…, or install "
            f"transformers {version}"
        )
    model_class: Any = kind
    values = dict(recorded["config"])
    values.pop("transformers_version", None)
    try:
        model: torch.nn.Module = model_class(model_class.config_class.from_dict(values))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidArgument(
            f"transformers {transformers.__version__} refuses the recorded configuration of "
            f"{recorded['class']} ({error}); install transformers {version}"
        ) from error
    for name, buffer in model.named_buffers():
        wanted = recorded.get("buffer_types", {}).get(name)
        if wanted is not None:  # `model.to` also converts buffers, such as frequencies
            buffer.data = buffer.data.to(getattr(torch, wanted))
    return model


def _matched(
    stored: RunParameters, model: torch.nn.Module
) -> list[tuple[StoredParameter, torch.nn.Parameter]]:
    """Pair each stored parameter with that of the model.

    Raises
    ------
    InvalidArgument
        If names, shapes or ties differ.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    recorded = {name: one for one in stored.parameters for name in one.names}
    found = []
    wrong = [f"the run has no {name}" for name in by_name if name not in recorded]
    wrong += [f"the model has no {name}" for name in recorded if name not in by_name]
    for one in stored.parameters:
        tensors = {id(by_name[name]): by_name[name] for name in one.names if name in by_name}
        if len(tensors) > 1:
            wrong.append(f"{' and '.join(one.names)} are one parameter in the run")
        for tensor in list(tensors.values())[:1]:
            if tuple(tensor.shape) != one.shape:
                wrong.append(
                    f"{one.name} has shape {tuple(tensor.shape)} in the model, and {one.shape} in "
                    "the run"
                )
            found.append((one, tensor))
    if wrong:
        more = f", and {len(wrong) - 3} more differences" if len(wrong) > 3 else ""
        raise InvalidArgument(
            f"the parameters of {type(model).__name__} differ from those of {stored.run}: "
            f"{'; '.join(wrong[:3])}{more}; {_remedy(stored)}"
        )
    return found


def _buffers(stored: RunParameters, model: torch.nn.Module) -> list[tuple[int, NativeType, str]]:
    """Return the first element, the type and the name of each recorded buffer.

    Raises
    ------
    InvalidArgument
        If the model lacks one, or it has another shape.
    """
    by_name = dict(model.named_buffers())
    found = []
    for entry in stored.attributes.get("buffers", []):
        buffer = by_name.get(entry["name"])
        if buffer is None or list(buffer.shape) != entry["shape"]:
            raise InvalidArgument(
                f"{type(model).__name__} has no buffer {entry['name']} of shape "
                f"{tuple(entry['shape'])}, which {stored.run} holds; {_remedy(stored)}"
            )
        found.append((entry["offset"], stored.native("buffers"), entry["name"]))
    return found


def _remedy(stored: RunParameters) -> str:
    version = (stored.attributes.get("model_config") or {}).get("transformers")
    if version is None or version == transformers.__version__:
        return "pass the recorded model, or a constructor that builds it"
    return (
        f"the run was recorded with transformers {version}, and this is "
        f"{transformers.__version__}: install transformers {version}"
    )
