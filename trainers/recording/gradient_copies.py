"""Copies of the gradients of a step, before the loop can change them.

The raw gradients go to the places of the row at once, and so do the summaries of the others. The
gradient that an optimizer gets is copied only if it differs from the raw one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence, Set

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import joint_type, same_bits
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import as_dense, gradient_of
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import is_sharded, own_rows, total_norm
from trajstore.trainers.recording.tape import Mark, Marks
from trajstore.trainers.recording.torch_internals import plain_total_norm


class GradientCopies:
    """The parameters of a training, and copies of their gradients.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows

    Attributes
    ----------
    parameters : tuple of tensor
        Those of the model and of the optimizers, each once.
    trained : set of int
        Places of those that the optimizers have.
    """

    def __init__(self, recording: Recording, rows: Sequence[ParameterRows]) -> None:
        self._recording, self._rows = recording, tuple(rows)
        self._optimizer = recording.optimizer
        self._needs_norm = any(
            not {"grad_norm", "clip_coef"}.isdisjoint(matrix.watched) for matrix in rows
        )
        self.find_parameters()
        types = {p.dtype for p in self.parameters if p.requires_grad and p.is_floating_point()}
        self._norm_type = functools.reduce(torch.promote_types, types, torch.bool)

    def find_parameters(self) -> None:
        """Find the parameters of the model and of the optimizers again."""
        of_optimizers = self._of_optimizers = self._optimizer.parameters(*self._optimizer.members)
        parameters = dict.fromkeys([*self._recording.model.parameters(), *of_optimizers])
        self.parameters = tuple(parameters)
        places = {parameter: place for place, parameter in enumerate(parameters)}
        self.trained = frozenset(map(places.__getitem__, of_optimizers))
        self._are_sharded = any(map(is_sharded, parameters))
        tensors = (matrix.parameter.tensor for matrix in self._rows)
        self._witnesses = [places[tensor] for tensor in tensors if tensor in places]

    @property
    def are_on_host(self) -> bool:
        """True if all matrices are on the CPU."""
        return all(rows.parameter.tensor.device.type == "cpu" for rows in self._rows)

    def are_others(self) -> bool:
        """Return True if the optimizers have other parameters than before."""
        now, before = self._optimizer.parameters(*self._optimizer.members), self._of_optimizers
        return len(now) != len(before) or not all(map(operator.is_, now, before))

    def present(self) -> list[torch.Tensor | None]:
        """Return the gradients of all parameters."""
        return [parameter.grad for parameter in self.parameters]

    def marks(self) -> Marks:
        """Return the marks of the matrices' gradients."""
        return [Mark.of(rows.parameter.tensor.grad) for rows in self._rows]

    def has_matrix(self, reached: Set[int]) -> bool:
        """Return True if a recorded matrix is one of some places."""
        return not reached.isdisjoint(self._witnesses)

    def witness(self, reached: Set[int]) -> int:
        """Return the place of the parameter that tells at first what becomes of a pass."""
        for place in self._witnesses:
            if place in reached:
                return place
        return min(reached & self.trained)

    def norm(self, optimizer: Optimizer | None = None) -> torch.Tensor | None:
        """Return the norm of all gradients, or those of one optimizer; None if none is needed."""
        if not self._needs_norm:
            return None
        of = self.parameters if optimizer is None else self._optimizer.parameters(optimizer)
        gradients = [p.grad for p in of if p.grad is not None]
        if not gradients:
            return None
        if any(map(operator.attrgetter("is_sparse"), gradients)):
            gradients = [*map(as_dense, gradients)]
        return total_norm(gradients) if self._are_sharded else plain_total_norm(gradients)

    def as_norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return a norm, or a factor of it, in the type of a norm of all gradients.

        A step may have gradients of some types only.
        """
        return value.to(joint_type(frozenset((value.dtype, self._norm_type))))

    def take(self, *, of: Optimizer | None = None, scale: float = 1.0) -> None:
        """Copy the gradients of the matrices that were not stepped yet, divided by `scale`.

        Parameters
        ----------
        of : Optimizer, optional
            Only those of one optimizer.
        scale : float
            Factor of a loss that the optimizer's step itself divides.
        """
        for rows in self._of_turn(of):
            if (gradient := gradient_of(rows.parameter.tensor)) is not None:
                own = own_rows(gradient)
                rows.set_gradient(own if scale == 1.0 else own / scale)

    def take_others(self, scale: float = 1.0) -> None:
        """Copy the gradients of the other parameters, or their norms, divided by `scale`."""
        state, summaries = self._recording.state, self._recording.summaries
        if state is None and summaries is None:
            return
        consumed = {*self._optimizer.parameters(*self._optimizer.turns)}
        factor = 1.0 / scale
        if state is not None:
            for rows in self._rows:
                before = rows.copy_of("params_grad")
                rows.set(state.after_backward(rows.variables, factor, consumed, before))
        if summaries is not None:
            summaries.after_backward(factor, consumed)

    def used(self, number: int, taken: Mark | None) -> torch.Tensor | None:
        """Return a copy of a gradient as it is now; None if it is the raw one, bit for bit.

        A change through `Tensor.data` is not counted, so on the host the bits are compared.
        """
        rows = self._rows[number]
        parameter = rows.parameter.tensor
        gradient, raw = gradient_of(parameter), rows.copy_of("grad")
        if gradient is None or raw is None:
            return None
        is_still = taken is not None and taken.is_still(parameter.grad)
        if is_sharded(parameter):  # all processes compare
            return rows.recorded_tokens(own_rows(gradient)).clone()
        if gradient.device.type != "cpu":
            return None if is_still else rows.recorded_tokens(gradient).clone()
        now = rows.recorded_tokens(gradient)
        return None if same_bits(raw, now) else now.clone()

    def _of_turn(self, optimizer: Optimizer | None) -> list[ParameterRows]:
        """Return the rows of an optimizer, or of all, that had no turn in the step."""
        turns = self._optimizer.turns
        return [
            rows
            for rows in self._rows
            if rows.parameter.optimizer not in turns
            and (optimizer is None or rows.parameter.optimizer in (optimizer, None))
        ]
