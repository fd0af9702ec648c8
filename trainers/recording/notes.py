"""Sentences about a recording, and the attributes that say how it was made.

`RunNotes` collects what a run does not hold, or not as the loop suggests. `FirstStep` looks for
what the recording cannot answer, `why_unproven` for steps that torch rounds otherwise than a
replay, `optimizer_advice` for types in which the optimizer has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import zarr
from torch.optim import Optimizer

from trajstore.errors import RecordingError
from trajstore.installation import __version__, version_of
from trajstore.optimizer_advice import Advice, advise
from trajstore.provenance import RunAttributes
from trajstore.store.metadata.metadata_form import UNPROVEN
from trajstore.store.metadata.zarr_json import notes_until
from trajstore.strict_json import utc_now
from trajstore.trainers.matrix_products import choose_products, modes_of_products
from trajstore.trainers.process_mode import process_modes
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.parameters import (
    JoinedOptimizer,
    RecordedParameter,
    gradient_of,
    rate_of,
)
from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import name_outside_compile

_MOST_RANGES = 1000
"""Maximum number of ranges of a note, which every commit writes; the last one then grows."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without space."""

_FAILED = (*FULL, errno.EIO, errno.EROFS)


class CannotFollow(RecordingError):
    """The training has changed so that no row of the run can hold its steps."""


def file_error(error: BaseException | None) -> OSError | None:
    """Return an error, or the one of its causes, that is about a file; None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


class RunNotes:
    """Sentences about a recording, each with its first step and the number of its steps.

    Parameters
    ----------
    report : callable
        Called with each sentence at the first time.
    strict : bool
        Raise an error in place of a note about a value that is not recorded.

    Attributes
    ----------
    entries : list of dict
        ``note``, ``first_step``, ``last_step`` and the ``count`` of steps. ``unproven``, if any:
        inclusive ranges of the steps that do not follow from the recorded values alone.
    """

    def __init__(self, report: Callable[[str], None], *, strict: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self.step = 0
        self._report = report
        self.strict = strict

    def add(self, sentence: str, *, unproven: bool = False) -> None:
        """Note something about the current step.

        Raises
        ------
        RecordingError
            If notes are errors.
        """
        if self.strict:
            raise RecordingError(sentence)
        self.mention(sentence, unproven=unproven)

    def ends_training(self, error: BaseException, *, has_begun: bool) -> bool:
        """Return True if the training has to know an error, and not only the recording ends.

        That is so for an interruption, a full or failed disk, a loop that cannot be recorded, and
        every error if notes are errors. Other errors of files, such as a folder that is gone, are
        the training's business only until the recording `has_begun`.
        """
        if self.strict or not isinstance(error, Exception):
            return True
        if (of_file := file_error(error)) is not None:
            return not has_begun or of_file.errno in _FAILED
        return isinstance(error, RecordingError) and not isinstance(error, CannotFollow)

    def mention(self, sentence: str, *, unproven: bool = False) -> None:
        """Note a fact about the current step that is no error.

        If the step is `unproven`, a replay does not compare it, and gives the sentence as reason.
        """
        entry = next((known for known in self.entries if known["note"] == sentence), None)
        if entry is None:
            steps = {"first_step": self.step, "last_step": self.step, "count": 1}
            entry = {"note": sentence, **steps}
            self.entries.append(entry)
            self._report(sentence)
        elif entry["last_step"] != self.step:
            entry["count"] += 1
            entry["last_step"] = self.step
        if unproven:
            ranges = entry.setdefault(UNPROVEN, [])
            if ranges and (self.step <= ranges[-1][1] + 1 or len(ranges) >= _MOST_RANGES):
                ranges[-1][1] = self.step
            else:
                ranges.append([self.step, self.step])

    def add_missing(self, matrix: str, steps: range) -> None:
        """Note that a run has no rows of some steps, from which the training continues."""
        self.step = steps[-1]
        self.mention(
            f"there are no rows of steps {steps[0]} to {steps[-1]} of {matrix}: no recording has "
            "committed them, so the weights at the resumed step were not compared either"
        )
        self.entries[-1] |= {"first_step": steps[0], "count": len(steps)}

    def resumed(self, before: Iterable[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
        """Begin with the notes of a run up to a step, and return all."""
        new_entries = {entry["note"]: entry for entry in self.entries}
        earlier = []
        for entry in notes_until(before, step):
            if (known := new_entries.get(entry["note"])) is None:
                earlier.append(entry)
                continue
            if entry["last_step"] < known["first_step"]:
                known["count"] += entry["count"]
            known["first_step"] = min(entry["first_step"], known["first_step"])
            if ranges := entry.get(UNPROVEN):
                more = [span for span in known.get(UNPROVEN, []) if span not in ranges]
                known[UNPROVEN] = ranges + more
        self.entries[:0] = earlier
        return self.entries


_COALESCING = (torch.optim.SparseAdam, torch.optim.Adagrad)
"""Optimizers that first add the rows of a sparse gradient."""


def why_unproven(optimizer: Optimizer, parameter: torch.Tensor, *, is_compiled: bool) -> str | None:
    """Return a sentence if a step does not follow bit for bit from the recorded gradient."""
    gradient: Any = parameter.grad
    if is_compiled:
        return "optimizer.step() is compiled, so it rounds otherwise than torch's own"
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_sharded(parameter):
        # The kernels of a device round every element alike, those of a processor not the last ones.
        if parameter.device.type == "cpu" and (is_fused or parameter.itemsize < 4):
            return "each process steps its own rows, the last of which a processor rounds otherwise"
        return None
    if gradient.is_sparse:
        return _unordered_sum(optimizer, gradient)
    if is_fused and not (parameter.is_contiguous() and gradient.is_contiguous()):
        return (
            "a fused optimizer steps a matrix that is not contiguous in memory, where it rounds "
            "otherwise; a step does not follow bit for bit"
        )
    return None


def _unordered_sum(optimizer: Optimizer, gradient: torch.Tensor) -> str | None:
    """Return a sentence if an optimizer does not use the sum of the rows of a sparse gradient."""
    if isinstance(optimizer, _COALESCING):
        return None
    keeps_rows = any(group.get("momentum") for group in optimizer.param_groups)
    is_unique = gradient.is_coalesced() or (
        # A device would have to be waited for.
        gradient.device.type == "cpu" and gradient.coalesce()._nnz() == gradient._nnz()
    )
    if is_unique and not keeps_rows:
        return None
    return (
        f"{type(optimizer).__name__} adds the rows of a sparse gradient one by one; grad holds "
        "their sum, so a step does not follow from it bit for bit"
    )


_LOOKED_AT = 4096  # elements of each parameter
_SHOWN = 3


class FirstStep:
    """Looks at the first step with a learning rate above 0.

    Parameters
    ----------
    model : Module
        Not wrapped.
    optimizer : JoinedOptimizer
    """

    def __init__(self, model: torch.nn.Module, optimizer: JoinedOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_over = False

    def begin(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copy some elements of each parameter that an optimizer with these groups may change."""
        if self.is_over:
            return
        trained = set()
        for group in groups:
            rate = rate_of(group)
            if rate is None or rate.item() > 0:
                trained |= {id(parameter) for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            gradient = gradient_of(parameter) if id(parameter) in trained else None
            if gradient is not None:
                used = (_part(gradient) != 0).any()
                self._before[name_outside_compile(name)] = _part(parameter).clone(), used

    def notes(self, kinds_of_autocast: Set[torch.dtype] = frozenset()) -> Iterator[str]:
        """Yield sentences about the step, once.

        Parameters
        ----------
        kinds_of_autocast : set of torch.dtype
            Types that autocast has chosen in forward passes on the CPU.
        """
        if not self._before:
            return
        self.is_over = True
        now = {name_outside_compile(name): p for name, p in self._model.named_parameters()}
        used = [name for name, (_, is_used) in self._before.items() if bool(is_used)]
        stuck = [name for name in used if torch.equal(self._before[name][0], _part(now[name]))]
        self._before.clear()
        if stuck:
            reason = "the updates round away in the type of the weights"
            if stuck == used:
                reason += ", or the optimizer only collects gradients at first"
            yield (
                f"the first step changed nothing in {_named(stuck)}, which had a gradient: {reason}"
            )
        known = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if outside := [name for name, p in now.items() if p.requires_grad and id(p) not in known]:
            yield (
                f"the optimizer lacks {len(outside)} parameters with requires_grad=True "
                f"({outside[0]}); if another optimizer trains them, pass a list of both"
            )
        kinds = {p.dtype for p in now.values()} | kinds_of_autocast
        device = next(iter(now.values())).device
        if not modes_of_products() and choose_products(kinds, device)[0] == "float32":
            yield (
                "this processor multiplies 16-bit matrices slowly; train inside "
                "trajstore.trainers.float32_products() to be several times as fast"
            )
        for member in self._optimizer.members:
            name = type(member).__name__
            if "scheduled_lr" in member.param_groups[0] or "ScheduleFree" in name:
                yield (
                    f"{name} computes its own rate from lr during warm-up; lr is that of the group"
                )


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first elements, or those of this process."""
    local = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach().flatten()[:_LOOKED_AT]


def _named(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more parameters" if more > 0 else "")


COMPUTED_AS_RECORDED = ("threads", "modes")
"""Facts that are set again when steps are computed again."""

_OPTIONAL = ("transformers", "accelerate")
_NUMERIC = (
    "torch", *_OPTIONAL, "processor", "processor_name", "cpu_capability", "device", "device_name",
    *COMPUTED_AS_RECORDED,
)  # fmt: skip
"""Facts on which the bits of a training run depend."""


@functools.cache  # reading them takes as long as some steps
def _versions() -> dict[str, str]:
    """Versions of the optional packages that are installed."""
    return {name: found for name in _OPTIONAL if (found := version_of(name))}


def provenance(device: torch.device, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return versions, machine, seed of torch's generator, and text.

    Parameters
    ----------
    device : torch.device
        Device of the training.
    origin : mapping, optional
        Further facts, such as the identities of the text and the tokenizer.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_versions(),
        "zarr": zarr.__version__,
        "trajstore": __version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "processor_name": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if (seed := torch.initial_seed()) < 1 << 32:  # torch draws a larger one for a program without
        facts["seed"] = seed
    if device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
    if modes := process_modes():
        facts["modes"] = modes
    facts |= origin or {}
    if commit := _git_commit():
        facts["git_commit"] = commit
    return facts


def processor_name() -> str:
    """Return the name of the processor; empty if the system does not tell it."""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def changed_provenance(before: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the changed facts on which the bits of a training run depend."""
    now = provenance(device)
    return {name: now.get(name) for name in _NUMERIC if before.get(name) != now.get(name)}


def resumed_provenance(before: RunAttributes, device: torch.device, step: int) -> dict[str, Any]:
    """Return the provenance of a resumed run, with an entry for the resumption.

    Parameters
    ----------
    before : RunAttributes
        Those of the run so far.
    device : torch.device
    step : int
        Step after which the run resumes.
    """
    entry = {"step": step, "time": utc_now(), **changed_provenance(before.provenance, device)}
    stored = before.provenance.get("resumed")
    return {**before.provenance, "resumed": [*(stored if isinstance(stored, list) else ()), entry]}


def optimizer_attributes(
    optimizer: Optimizer, group: dict[str, Any], schedule: dict[str, Any]
) -> dict[str, Any]:
    """Return the class and the hyperparameters of the optimizer for the recorded parameter.

    Parameters
    ----------
    optimizer : Optimizer
    group : dict
        Parameter group of the recorded parameter.
    schedule : dict
        Change of its learning rate, and the norm to which the loop clips gradients.
    """
    return {**_rule_attributes(optimizer, group), "schedule": schedule}


def group_attributes(optimizer: JoinedOptimizer) -> list[dict[str, Any]]:
    """Return class and hyperparameters of each parameter group; of several optimizers the name."""
    return [
        _rule_attributes(member, group)
        | ({"name": optimizer.named([member])} if len(optimizer.members) > 1 else {})
        for member in optimizer.members
        for group in member.param_groups
    ]


def class_path(kind: type) -> str:
    """Return the full name of a class, as the attribute ``optimizer`` of a run has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _rule_attributes(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    hyperparameters = {
        key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    tensors = {
        key: type_name(first.dtype)
        for key, value in group.items()
        for first in (value[:1] if isinstance(value, tuple) else [value])
        if isinstance(first, torch.Tensor)
    }
    rule = {"class": class_path(type(optimizer)), "hyperparameters": hyperparameters}
    return rule | ({"tensors": tensors} if tensors else {})


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    is_json = not isinstance(value, float) or math.isfinite(value)
    if is_json and (isinstance(value, bool | int | float | str) or value is None):
        return value
    return str(value)


def _git_commit() -> str | None:
    """Return the commit of the working directory; None without a repository or git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


_LOG = logging.getLogger(__name__)


def optimizer_advice(parameters: Sequence[RecordedParameter]) -> list[Advice]:
    """Return advice about types in which the optimizer has no effect.

    Parameters
    ----------
    parameters : sequence of RecordedParameter

    Returns
    -------
    list of Advice
        Each sentence once, for all parameters together.
    """
    entries = (
        advice
        for parameter in parameters
        if parameter.optimizer is not None
        for advice in advise(
            optimizer_attributes(parameter.optimizer, parameter.group, {}),
            state=_state_type(parameter, parameter.optimizer),
            weights=type_name(parameter.tensor.dtype),
        )
    )
    return list({advice.sentence: advice for advice in entries}.values())


def report_notes(sentences: Iterable[str], on_note: Callable[[str], None] | None) -> None:
    """Pass sentences to a function, or else to the logger of this module.

    They are not Python warnings, because a filter may turn those into errors.
    """
    report = on_note or functools.partial(_LOG.warning, "%s")
    for sentence in sentences:
        report(sentence)


def _state_type(parameter: RecordedParameter, optimizer: Optimizer) -> str:
    """Return the type of the state: from the group, the existing state, or the parameter."""
    if "state_dtype" in parameter.group:
        return str(parameter.group["state_dtype"])
    state = optimizer.state.get(parameter.tensor, {})
    return type_name(state.get("exp_avg_sq", parameter.tensor).dtype)
