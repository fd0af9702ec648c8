"""One step of an optimizer for the vectors that join all parameters but the recorded matrix.

Each parameter is a segment of elements. Its optimizer group defines the rule and the learning rate,
and the optimizer counts its steps: none in a step in which it has no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.values.optimizer_rule import MOMENTS, OptimizerRule, Rates

VECTORS = {
    "W": "params",
    "exp_avg": "params_exp_avg",
    "exp_avg_sq": "params_exp_avg_sq",
    "grad": "params_grad",
}
"""Vector of each array of the recorded matrix."""


@dataclass(frozen=True, kw_only=True)
class VectorRule:
    """Rule by which the next row of the vectors follows, by Adam.

    Attributes
    ----------
    groups : tuple of OptimizerRule
        Rule of each group of the optimizer.
    segments : tuple of (int, int, int)
        First element of each parameter, number of its group, and its position among all parameters.
        A segment ends where the next one begins.
    parameters : int
        Number of all parameters.
    """

    groups: tuple[OptimizerRule, ...]
    segments: tuple[tuple[int, int, int], ...]
    parameters: int

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """Rule of a run.

        Parameters
        ----------
        attributes : mapping
            Attributes of the root: ``parameters``, and ``optimizer`` with ``groups``.

        Raises
        ------
        InvalidArgument
            If they are missing, the parameters have several types, or a group has no rule or
            one without moments.
        """
        table = attributes.get("parameters")
        described = (attributes.get("optimizer") or {}).get("groups")
        if not table or not described:
            raise InvalidArgument("the run does not name its parameters and groups")
        groups = tuple(OptimizerRule.of(group) for group in described)
        for rule, group in zip(groups, described, strict=True):
            if rule.kind != "adam":
                raise InvalidArgument(f"{group['class']!r} does not count steps by parameter")
            if group["hyperparameters"].get("rounding", "nearest") != "nearest":
                raise InvalidArgument(f"the optimizer {group['class']!r} rounds at random")
        joined = [entry for entry in table if entry["variable"] == "params"]
        for key in ("dtype", *(f"{kind}_dtype" for kind in VECTORS)):
            types = sorted({str(entry[key]) for entry in joined if key in entry})
            if len(types) > 1:
                raise InvalidArgument(
                    f"the parameters or their moments have several types: {', '.join(types)}"
                )
        segments = tuple(
            # A parameter without a group takes no step, so any group will do.
            (int(entry["offset"]), int(entry["group"] or 0), number)
            for number, entry in enumerate(table)
            if entry["variable"] == "params" and math.prod(entry["shape"])
        )
        return cls(groups=groups, segments=segments, parameters=len(table))

    def facts(self) -> dict[str, Any]:
        """The rule as JSON values, for `from_facts`."""
        return {
            "groups": [rule.facts() for rule in self.groups],
            "segments": [list(segment) for segment in self.segments],
            "parameters": self.parameters,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The rule that `facts` describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        if facts.keys() != {"groups", "segments", "parameters"}:
            raise ValueError(f"no rule of vectors has {dict(facts)!r}")
        groups = tuple(OptimizerRule.from_facts(each) for each in facts["groups"])
        segments = tuple((first, group, number) for first, group, number in facts["segments"])
        parameters, starts = facts["parameters"], [first for first, _, _ in segments]
        numbers = [parameters, *(value for segment in segments for value in segment)]
        if (
            not all(type(number) is int for number in numbers)
            or any(rule.kind != "adam" for rule in groups)
            or not segments
            or starts[0] != 0
            or any(one >= other for one, other in itertools.pairwise(starts))
            or not all(0 <= group < len(groups) for _, group, _ in segments)
            or not all(0 <= number < parameters for _, _, number in segments)
        ):
            raise ValueError(f"no rule of vectors has {dict(facts)!r}")
        return cls(groups=groups, segments=segments, parameters=parameters)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the recorded vectors that a step makes, that of the values first."""
        return tuple(VECTORS[name] for name in ("W", *MOMENTS))

    def parts(self, first: int, length: int) -> Iterator[tuple[slice, int, int]]:
        """Parts of a range of elements, each with its group and the position of its parameter."""
        ends = [start for start, _, _ in self.segments[1:]] + [first + length]
        for (start, group, parameter), end in zip(self.segments, ends, strict=True):
            begin, stop = max(start - first, 0), min(end - first, length)
            if begin < stop:
                yield slice(begin, stop), group, parameter

    @staticmethod
    def rates(
        rates: Mapping[str, npt.NDArray[Any]], group: int, parameter: int
    ) -> list[Rates | None]:
        """Numbers of each step for one parameter; None if it takes no step.

        Parameters
        ----------
        rates : mapping of str to ndarray, (row, …)
            ``params_lr``, ``params_count``, and ``clip_coef`` if the run has it.
        group, parameter : int
        """
        counts = rates["params_count"][:, parameter]
        made: list[Rates | None] = [None]
        for row in range(1, len(counts)):
            count, lr = counts[row], float(rates["params_lr"][row, group])
            taken = count == counts[row - 1] + 1 and count >= 1 and math.isfinite(lr)
            clip = float(rates["clip_coef"][row]) if "clip_coef" in rates else 1.0
            made.append(Rates(step=int(count), lr=lr, clip=clip) if taken else None)
        return made[: len(counts)]
