"""The model of a recorded step: built, set in a model of the user, or written to a folder.

`StepModel` matches the parameters of a run with those of a model, and sets them to a row.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch.optim import Optimizer

from trajstore.arguments import ANY, checks_types, exact
from trajstore.errors import InvalidArgument, RunExists, needs_extra
from trajstore.installation import imported, version_of
from trajstore.provenance import RunAttributes
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.storage.remote_path import RunPath, local_path
from trajstore.store.writing.create import staged_file, staged_run
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.kept_state import set_random_state
from trajstore.trainers.recording.notes import group_attributes
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_group
from trajstore.trainers.runs.developed_run import rows_of
from trajstore.trainers.states.state import State
from trajstore.trainers.states.stored_model import StoredModel, StoredParameter
from trajstore.trainers.texts import find_tokenizer
from trajstore.values.optimizer_rule import with_numbers

Constructor = Callable[[], torch.nn.Module]
"""Builds the model of a run; its weights are replaced."""


@checks_types
def model_at(run: RunPath, step: int, *, constructor: Constructor | None = None) -> torch.nn.Module:
    """Return the model as it was after a step, in evaluation mode, on the CPU.

    Weights and recorded buffers have the recorded bits. Tied weights are tied.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``.
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
    >>> model = model_at("everything.zarr", 3)
    >>> model.lm_head.weight is model.transformer.wte.weight, model.dtype
    (True, torch.bfloat16)
    """
    with rows_of(run, [step]) as rows:
        ((_, model),) = models(rows, [step], constructor=constructor)
    return model


def models(
    run: RunPath, steps: Iterable[int] | None = None, *, constructor: Constructor | None = None
) -> Iterator[tuple[int, torch.nn.Module]]:
    """Iterate over the models of many steps. One model is updated in place.

    Each block of rows is read once, so all its steps cost little more than one of them.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``.
    steps : iterable of int, optional
        Recorded steps; the models have increasing steps. Default: all recorded steps, or all
        keyframes.
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
    >>> run = models("everything.zarr")
    >>> norms = {step: model.lm_head.weight.norm().item() for step, model in run}
    >>> list(norms)
    [0, 1, 2, 3]
    """
    every = StoredModel(run).steps
    chosen = every if steps is None else exact("steps", steps, "int64", least=ANY)
    selected = np.unique(chosen).tolist()
    with rows_of(run, selected) as rows:
        stored = StoredModel(rows)
        model: StepModel | None = None
        for step, weights in stored.weights(selected):
            model = model or StepModel(stored, constructor)
            model.set(weights)
            yield step, model.module


class StepModel:
    """A model whose parameters are set to those of recorded steps.

    Parameters
    ----------
    stored : StoredModel
    constructor : callable, optional

    Attributes
    ----------
    module : Module
        In evaluation mode.
    parameters : list of (StoredParameter, Parameter)
        Each stored parameter with that of the model.
    """

    def __init__(self, stored: StoredModel, constructor: Constructor | None = None) -> None:
        with torch.random.fork_rng(devices=[]):  # building draws weights, which are replaced
            self.module = _built(stored, constructor)
        self.parameters = _matched(stored, self.module)
        self._check_buffers(stored)
        self._built = dict(self.module.named_buffers())
        self._set_types()
        for parameter, tensor in self.parameters:
            tensor.requires_grad_(parameter.requires_grad)

    def set(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters and buffers, remove gradients, and set evaluation mode."""
        self._set_types()
        self.copy(weights)
        self.module.eval()

    def _set_types(self) -> None:
        """Set the recorded types, also after a user has converted the model."""
        for parameter, tensor in self.parameters:
            tensor.data = tensor.data.to(getattr(torch, parameter.native.name))
        for name, built in self._built.items():
            now = self.module.get_buffer(name)
            if now.dtype != built.dtype:
                owner, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(owner), last, built.to(now.device))

    @torch.no_grad()
    def copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters and recorded buffers, without gradients."""
        tensors = {parameter.name: tensor for parameter, tensor in self.parameters}
        for name, values in weights.items():
            tensor = tensors[name] if name in tensors else self.module.get_buffer(name)
            tensor.copy_(values)
            tensor.grad = None

    def _check_buffers(self, stored: StoredModel) -> None:
        """Check that the model has each recorded buffer, of the same shape."""
        by_name = dict(self.module.named_buffers())
        for entry in stored.buffers:
            buffer = by_name.get(entry["name"])
            if buffer is None or list(buffer.shape) != entry["shape"]:
                raise InvalidArgument(
                    f"{type(self.module).__name__} has no buffer {entry['name']} of shape "
                    f"{tuple(entry['shape'])}, which {stored.run} holds; {_remedy(stored)}"
                )


def _built(stored: StoredModel, constructor: Constructor | None) -> torch.nn.Module:
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
            "of transformers; give constructor=…, a function that returns the model"
        )
    return _of_transformers(recorded, stored.run)


def _of_transformers(recorded: Mapping[str, Any], run: RunPath) -> torch.nn.Module:
    """Return a model of transformers from the attribute ``model_config``.

    Only models of transformers are built, so a file cannot choose what is executed.
    """
    with needs_extra("a model of transformers", "train"):
        import transformers
    version = recorded.get("transformers")
    kind = getattr(transformers, str(recorded.get("class")), None)
    if not inspect.isclass(kind) or not issubclass(kind, transformers.PreTrainedModel):
        raise InvalidArgument(
            f"{run} records a model of the class {recorded.get('class')}, which transformers "
            f"{version_of('transformers')} does not have; give constructor=…, or install "
            f"transformers {version}"
        )
    model_class: Any = kind
    values = dict(recorded["config"])
    values.pop("transformers_version", None)
    try:
        model: torch.nn.Module = model_class(model_class.config_class.from_dict(values))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidArgument(
            f"transformers {version_of('transformers')} refuses the recorded configuration of "
            f"{recorded['class']} ({error}); install transformers {version}"
        ) from error
    for name, buffer in model.named_buffers():
        dtype = recorded.get("buffer_types", {}).get(name)
        if dtype is not None:  # `model.to` also converts buffers, such as frequencies
            buffer.data = buffer.data.to(getattr(torch, dtype))
    return model


def _matched(
    stored: StoredModel, model: torch.nn.Module
) -> list[tuple[StoredParameter, torch.nn.Parameter]]:
    """Pair each stored parameter with that of the model.

    Raises
    ------
    InvalidArgument
        If names, shapes or ties differ.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    recorded = {name: parameter for parameter in stored.parameters for name in parameter.names}
    pairs = []
    wrong = [f"the run has no {name}" for name in by_name if name not in recorded]
    wrong += [f"the model has no {name}" for name in recorded if name not in by_name]
    for parameter in stored.parameters:
        tensors = {id(by_name[name]): by_name[name] for name in parameter.names if name in by_name}
        if len(tensors) > 1:
            wrong.append(f"{' and '.join(parameter.names)} are one parameter in the run")
        for tensor in list(tensors.values())[:1]:
            if tuple(tensor.shape) != parameter.shape:
                wrong.append(
                    f"{parameter.name} has shape {tuple(tensor.shape)} in the model, and "
                    f"{parameter.shape} in the run"
                )
            pairs.append((parameter, tensor))
    if wrong:
        more = f", and {len(wrong) - 3} more differences" if len(wrong) > 3 else ""
        raise InvalidArgument(
            f"the parameters of {type(model).__name__} differ from those of {stored.run}: "
            f"{'; '.join(wrong[:3])}{more}; {_remedy(stored)}"
        )
    return pairs


def _remedy(stored: StoredModel) -> str:
    version = (stored.attributes.get("model_config") or {}).get("transformers")
    if version in (None, installed := version_of("transformers")):
        return "pass the recorded model, or a constructor that builds it"
    return (
        f"the run was recorded with transformers {version}, and this is "
        f"{installed}: install transformers {version}"
    )


@checks_types
def optimizer_state_at(run: RunPath, step: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the optimizer's state after a step, as `load_state_dict` takes it.

    Tensors and numbers have the recorded bits and types. The learning rate of a group is the one
    that the step used, and so are the hyperparameters of the group of W; at step 0, and in other
    groups, they are the initial ones. Load it into an optimizer of the same class with the same
    parameter groups.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``, with any
        optimizer that keeps tensors of its parameters' shapes and numbers only.
    step : int
        A recorded step; 0 is the initial state.

    Returns
    -------
    dict, or list of dict
        With ``state`` and ``param_groups``. A parameter without a gradient so far has no state. Of
        several optimizers, a list in the order in which `capture` got them.

    Raises
    ------
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters or the whole state of the optimizer.
    StepNotFound
        If the run does not hold the step.

    Examples
    --------
    >>> state = optimizer_state_at("everything.zarr", 3)
    >>> decays = [group["weight_decay"] for group in state["param_groups"]]
    >>> state["state"][0]["step"].item(), decays
    (3.0, [0.01, 0.0])
    """
    with rows_of(run, [step]) as rows:
        states = StoredModel(rows).state_dicts(step)
    return states[0] if len(states) == 1 else states


@checks_types
def restore(
    run: RunPath,
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    step: int | None = None,
) -> int:
    """Set a model and its optimizer to the state after a recorded step.

    Weights, recorded buffers, and all that the optimizer keeps get the recorded bits. The learning
    rates, and the hyperparameters of the group of the recorded matrix, become those that the next
    step used; after the last step of the run they stay as they are. Set a schedule to the step
    before. If the model draws random numbers, the generators of the CPU and of its device get
    their states before the first forward pass of the next step. The order of the data is that of
    the caller.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``.
    model : Module
        The model of the recording, not wrapped.
    optimizer : Optimizer, or sequence of Optimizer
        Class and parameter groups of each are those of the recording, with the same parameters.
    step : int, optional
        Default: the last step with the whole state; if the run has ``random_state``, the last one
        before the last row. The random state after that row is not recorded, so its step has to be
        repeated.

    Returns
    -------
    int
        The step, for ``capture(..., resume=True, first_step=step)``.

    Raises
    ------
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters or the whole state of the optimizer.
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        If model or optimizer have other parameters than the run, the optimizer is of another class,
        or the random state after the step is not recorded.

    Examples
    --------
    >>> from trajstore.trainers import capture
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> options = {"parameter": "0.weight", "variables": "everything"}
    >>> with capture(model, optimizer, "run.zarr", **options) as run:
    ...     for _ in range(3):
    ...         loss = model(torch.arange(5)).square().sum()
    ...         loss.backward()
    ...         run.observe(loss=loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> trained = model[1].bias.tolist()
    >>> torch.nn.init.zeros_(model[1].bias).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    >>> restore("run.zarr", model, optimizer), model[1].bias.tolist() == trained
    (3, True)
    """
    stored = StoredModel(run)
    if step is not None and step not in stored.steps:  # with the settings of the next step
        with rows_of(run, [step, min(step + 1, max(stored.all_steps, default=0))]) as rows:
            if rows is not run:
                return restore(rows, model, optimizer, step=step)
    possible = stored.restorable
    if not len(possible):
        raise InvalidArgument(
            f"{run} has no step that can be restored, because the random state after a step "
            "is in the row of the next one; record every step"
        )
    step = int(possible[-1]) if step is None else step
    stored.number(step)
    if step not in possible:
        raise InvalidArgument(
            f"{run} does not hold step {step + 1}, whose row has the random state after "
            f"step {step}; restore step {possible[-1]}, or one before it"
        )
    kept = stored.kept(step)
    _check_types(stored, model)
    joined = JoinedOptimizer(optimizer)
    _check_classes(stored, joined)
    tensors = StepModel(stored, lambda: model)
    trained = {p.name: t for p, t in tensors.parameters if find_group(joined, t) is not None}
    if missing := sorted(kept.keys() - trained.keys()):
        raise InvalidArgument(
            f"{missing[0]} is not in the optimizer, but that of {run} trained it; build "
            "the optimizer with the recorded parameters"
        )
    ((_, weights),) = stored.weights([step])
    tensors.copy(weights)
    State(step=step, weights=weights, kept=kept).set_kept(trained, joined)
    for name, values in kept.items():
        state = joined.state[trained[name]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and state[key].dtype != value.dtype:
                # torch has converted it to the type of the parameter.
                state[key] = value.to(state[key].device)
    if step + 1 in stored.all_steps:
        set_numbers(stored, joined, trained, step + 1)
        if "random_state" in stored:
            set_generators(model, stored.value("random_state", step + 1))
    return step


def set_numbers(
    stored: StoredModel,
    optimizer: JoinedOptimizer,
    trained: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    """Set rates and hyperparameters of the groups of trained parameters to those of a step."""
    used = stored.settings(step)
    for recorded in stored.parameters:
        if recorded.group is not None and recorded.name in trained:
            group = find_group(optimizer, trained[recorded.name]) or {}
            for key, value in with_numbers(group, used[recorded.group]).items():
                if isinstance(tensor := group[key], torch.Tensor):  # which a program may hold
                    tensor.fill_(value)
                else:
                    group[key] = value


def _check_types(stored: StoredModel, model: torch.nn.Module) -> None:
    """Check that the parameters have the recorded types, before anything changes."""
    recorded = {parameter.name: parameter.native.name for parameter in stored.parameters}
    for name, tensor in model.named_parameters():
        kind = type_name(tensor.dtype)
        if recorded.get(name, kind) != kind:
            raise InvalidArgument(
                f"{name} is {kind} in the model and {recorded[name]} in {stored.run}; build the "
                "model in the recorded types"
            )


def _check_classes(stored: StoredModel, joined: JoinedOptimizer) -> None:
    """Check that the optimizers are of the recorded classes, whose state they get."""
    recorded, classes = (
        sorted({entry["class"].rpartition(".")[2] for entry in groups})
        for groups in (
            RunAttributes.of(stored.attributes).optimizer.groups,
            group_attributes(joined),
        )
    )
    if classes != recorded:
        raise InvalidArgument(
            f"the optimizer is {' and '.join(classes)}, and that of {stored.run} was "
            f"{' and '.join(recorded)}; build the optimizer of the recording"
        )


def set_generators(model: torch.nn.Module, values: npt.NDArray[Any]) -> None:
    """Set the random generators of a model's device to a row of ``random_state``."""
    device = next(model.parameters()).device
    set_random_state(device, torch.from_numpy(values).to(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A folder or file with the model of a step.

    Attributes
    ----------
    path : Path
    step : int
    tokenizer : str or None
        Name of its tokenizer.
    notes : tuple of str
        Limits of the folder or file, such as a missing tokenizer.
    strict : bool
        False if a model may have other buffers than the file: use ``strict=False`` to load it.
    """

    path: Path
    step: int
    tokenizer: str | None
    notes: tuple[str, ...]
    strict: bool = True


@checks_types
def checkout(
    run: RunPath,
    output: str | os.PathLike[str],
    *,
    step: int,
    optimizer: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    constructor: Constructor | None = None,
    overwrite: bool = False,
) -> Checkout:
    """Write the model of a step to a folder that ``from_pretrained`` loads, or to a file.

    The folder has the weights (safetensors), the configuration, and the tokenizer if the run has
    one. ``AutoModelForCausalLM.from_pretrained(output)`` returns a model with the recorded bits.
    A model that is not of transformers is written as its state dict, ``model.pt``.

    An `output` that ends in ``.pt``, ``.pth`` or ``.safetensors`` is a file with the state dict. Of
    a model that is not of transformers, without a constructor, it has the parameters, under all
    names of tied ones, and the recorded buffers. The metadata of a safetensors file have
    ``token_text``, a JSON list, if the run has it.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"`` or ``"keyframes"``.
    output : path-like
        The new folder or file.
    step : int
        A recorded step; 0 is the initial state.
    optimizer : bool
        Of a folder: also write ``optimizer.pt``: the state dict of the optimizer for `torch.load`,
        or a list of them.
    tokenizer : path-like or str, optional
        Of a folder: tokenizer instead of the run's: ``ascii``, a folder, or a ``tokenizer.json``.
    constructor : callable, optional
        As for `model_at`.
    overwrite : bool
        Replace an existing checkout, or file.

    Returns
    -------
    Checkout

    Raises
    ------
    RunExists
        If `output` exists, and `overwrite` is not set or it is no checkout.
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters, or with `optimizer` the whole state of the
        optimizer.
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        As for `model_at`; or if `optimizer` or `tokenizer` is given with a file, or `output` ends
        in ``.bin``.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM
    >>> found = checkout("everything.zarr", "step-3", step=3)
    >>> found.tokenizer, AutoModelForCausalLM.from_pretrained(found.path).dtype
    ('ascii', torch.bfloat16)
    """
    ending = Path(output).suffix.lower()
    if ending == ".bin":
        raise InvalidArgument(f"got {output}, expected a folder, NAME.pt or NAME.safetensors")
    if ending in (".pt", ".pth", ".safetensors"):
        if optimizer or tokenizer is not None:
            raise InvalidArgument(f"{output} is a file, which has weights only; give a folder")
        return _weights_file(run, local_path(output), step, constructor, overwrite=overwrite)
    check_new_folder(output, overwrite=overwrite)
    with rows_of(run, [step]) as rows:
        stored = StoredModel(rows)
        model: Any = model_at(rows, step, constructor=constructor)
        encoder = find_tokenizer(stored.attributes, tokenizer)
        states = stored.state_dicts(step) if optimizer else []
    with staged_run(output, overwrite=overwrite, check=check_new_folder) as new:
        new.mkdir()
        if isinstance(model, imported("transformers.modeling_utils", "PreTrainedModel")):
            model.save_pretrained(new)
        else:
            torch.save(model.state_dict(), new / "model.pt")
        if encoder is not None:
            encoder.pretrained().save_pretrained(new)
        if states:
            torch.save(states[0] if len(states) == 1 else states, new / "optimizer.pt")
    return Checkout(
        path=local_path(output),
        step=step,
        tokenizer=None if encoder is None else encoder.name,
        notes=tuple(_notes(stored, has_tokenizer=encoder is not None)),
    )


def _weights_file(
    run: RunPath, output: Path, step: int, constructor: Constructor | None, *, overwrite: bool
) -> Checkout:
    notes = []
    with rows_of(run, [step]) as rows, staged_file(output, overwrite=overwrite) as new:
        stored, group = StoredModel(rows), open_group(rows)
        exact_model = constructor is not None or "model_config" in stored.attributes
        if exact_model:
            weights = model_at(rows, step, constructor=constructor).state_dict()
        else:  # the run does not say which buffers the model has
            ((_, stored_weights),) = stored.weights([step])
            names = {p.name: p.names for p in stored.parameters}
            weights = {
                every: tensor
                for name, tensor in stored_weights.items()
                for every in names.get(name, (name,))
            }
            notes.append(
                "the file has the parameters and the recorded buffers; it lacks buffers that "
                "never changed, and may have non-persistent ones: load it with strict=False, or "
                "give constructor=…"
            )
        notes += _target_notes(stored)
        texts = whole(rows, group, "token_text").tolist() if "token_text" in group else None
        if output.suffix.lower() != ".safetensors":
            torch.save(weights, new)
            if texts:
                notes.append("the file has no token_text; a .safetensors file would have it")
        else:  # whose tensors share no memory; save_file would ignore the umask
            weights = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
            new.write_bytes(save(weights, {"token_text": json.dumps(texts)} if texts else None))
    return Checkout(path=output, step=step, tokenizer=None, notes=tuple(notes), strict=exact_model)


_FILES = {"model.pt", "optimizer.pt", "tokenizer.json", "tokenizer_config.json"}
"""Files of a checkout of a model that is not of transformers."""


def check_new_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Check that a checkout may be written to a folder, and return its path.

    Raises
    ------
    RunExists
        If the path exists, and `overwrite` is not set or it is not the folder of a model.
    InvalidArgument
        If the path is an address.
    """
    target = local_path(path).absolute()
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise RunExists(
                f"{path} already exists; choose another path, or replace it with overwrite=True"
            )
        files = {part.name for part in target.iterdir()} if target.is_dir() else set()
        is_checkout = "config.json" in files or "model.pt" in files <= _FILES
        if target.is_symlink() or not is_checkout:
            raise RunExists(f"{path} is not a checkout and is not overwritten; choose another path")
    return target


def _notes(stored: StoredModel, *, has_tokenizer: bool) -> Iterator[str]:
    if not has_tokenizer:
        yield "the run has no tokenizer, so the folder has none; to add one, give tokenizer=…"
    yield from _target_notes(stored)
    types = {parameter.native.name for parameter in stored.parameters}
    if len(types) > 1 and "model_config" in stored.attributes:
        yield (
            f"the parameters have several types ({', '.join(sorted(types))}), and from_pretrained "
            "converts them to one; use trajstore.trainers.model_at"
        )


def _target_notes(stored: StoredModel) -> Iterator[str]:
    if attribute(stored.attributes, "config", "data", "target_offset") == 2:
        yield (
            "the model predicts the token after next (data.target_offset = 2), so model.generate "
            "skips a token; use: trajstore evaluate RUN generation"
        )
