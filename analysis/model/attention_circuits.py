"""OV and QK circuits of attention heads: matrices that are products of two weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajstore.analysis.scan.block_tasks import Array
from trajstore.arguments import Count, check_fields
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_info import parameter_entry, parameter_table

CIRCUITS = {"ov": ("value", "output"), "qk": ("query", "key")}
"""Roles of the two weights of each circuit."""

_LAYER = "{layer}"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Names and layout of the attention weights of a model.

    Attributes
    ----------
    query, key, value, output : str
        Names of the parameters, with ``{layer}`` in place of the number of the layer. Weights of
        one name share that parameter: its output dimensions hold them one after another.
    heads : int
    kv_heads : int, optional
        Number of heads of key and value, of which each serves as many consecutive heads. Default:
        `heads`.
    transposed : bool
        True for weights of shape (output, input), as of ``torch.nn.Linear``. False for (input,
        output), as of GPT-2.

    Raises
    ------
    InvalidArgument
        For a field of another type, or if `kv_heads` does not divide `heads`.

    Examples
    --------
    >>> llama = Attention(
    ...     query="model.layers.{layer}.self_attn.q_proj.weight",
    ...     key="model.layers.{layer}.self_attn.k_proj.weight",
    ...     value="model.layers.{layer}.self_attn.v_proj.weight",
    ...     output="model.layers.{layer}.self_attn.o_proj.weight",
    ...     heads=32,
    ...     kv_heads=8,
    ... )
    """

    query: str
    key: str
    value: str
    output: str
    heads: Count
    kv_heads: Count | None = None
    transposed: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heads % (self.kv_heads or self.heads):
            raise InvalidArgument(
                f"got kv_heads={self.kv_heads} for heads={self.heads}, expected a divisor"
            )

    def part(self, role: str, head: int, weight: Array) -> Array:
        """Columns of a weight that belong to a head, (model, head size).

        Parameters
        ----------
        role : {'query', 'key', 'value', 'output'}
            For ``output`` the transpose: rows of a weight (head size, model).
        head : int
        weight : ndarray
            Whole parameter.

        Raises
        ------
        InvalidArgument
            If the number of heads does not divide the length of the parameter.
        """
        columns = weight if self.transposed == (role == "output") else weight.T
        shared = self.kv_heads or self.heads
        heads = {"query": self.heads, "key": shared, "value": shared, "output": self.heads}
        same = [other for other in heads if getattr(self, other) == getattr(self, role)]
        total = sum(heads[other] for other in same)
        size, rest = divmod(columns.shape[1], total)
        if rest:
            raise InvalidArgument(
                f"{getattr(self, role)} has {columns.shape[1]} dimensions for {total} heads of "
                f"{', '.join(same)}, expected a multiple; correct heads, kv_heads or transposed"
            )
        before = sum(heads[other] for other in same[: same.index(role)])
        first = (before + head * heads[role] // self.heads) * size
        return columns[:, first : first + size]


def circuits_of(
    attributes: Mapping[str, Any], of: str, attention: Attention
) -> dict[str, tuple[str, str]]:
    """Names of the two weights of each layer's circuits, by the name of the attention module.

    Parameters
    ----------
    attributes : mapping
        Root attributes of a run that holds all parameters.
    of : {'ov', 'qk'}
    attention : Attention

    Raises
    ------
    InvalidArgument
        If no parameter has the name of a weight, or the heads do not divide its length.
    """
    first, second = (getattr(attention, role) for role in CIRCUITS[of])
    named = re.compile(re.escape(first).replace(re.escape(_LAYER), r"(\d+)"))
    layers = [match[1] for name in _names(attributes) if (match := named.fullmatch(name))]
    if not layers or _LAYER not in first:
        raise InvalidArgument(
            f"no parameter is named {first!r} with a number in place of {_LAYER}; list the names "
            "with: trajstore info"
        )
    found = {}
    before, _, after = attention.output.partition(_LAYER)
    for layer in layers:
        weights = (first.replace(_LAYER, layer), second.replace(_LAYER, layer))
        for role, name in zip(CIRCUITS[of], weights, strict=True):
            shape = parameter_entry(attributes, name)["shape"]
            attention.part(role, 0, np.broadcast_to(0.0, shape))  # raises if heads do not fit
        found[f"{before}{layer}{after.removesuffix('.weight').rpartition('.')[0]}"] = weights
    return found


def gpt2_attention(attributes: Mapping[str, Any]) -> Attention:
    """Attention of a GPT-2 of transformers, from the names of its parameters and its config.

    Raises
    ------
    InvalidArgument
        For any other model.
    """
    last = "h.0.attn.c_attn.weight"
    prefix = next((name[: -len(last)] for name in _names(attributes) if name.endswith(last)), None)
    heads = attributes.get("model_config", {}).get("config", {}).get("n_head")
    if prefix is None or heads is None:
        raise InvalidArgument(
            "the run is not of a GPT-2 of transformers, so the names of its attention weights are "
            "unknown; pass attention=analysis.Attention(query=…, key=…, value=…, output=…, heads=…)"
        )
    joint = f"{prefix}h.{_LAYER}.attn.c_attn.weight"
    output = f"{prefix}h.{_LAYER}.attn.c_proj.weight"
    return Attention(
        query=joint, key=joint, value=joint, output=output, heads=heads, transposed=False
    )


def _names(attributes: Mapping[str, Any]) -> list[str]:
    return [entry["name"] for entry in parameter_table(attributes)]
