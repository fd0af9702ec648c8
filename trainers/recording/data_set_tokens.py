"""What a Trainer's data set and tokenizer tell of the tokens that are recorded."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.recording.options import RecordingOptions
from trainers.recording.parameters import RecordedParameter, unwrap
from trainers.token_texts import token_texts

__all__ = ["COUNTING_SECONDS", "TokenFacts", "facts_of_trainer"]

COUNTING_SECONDS = 5.0
"""Most that counting the tokens of a data set may take; one that takes longer is not counted."""

_TOKENS = ("input_ids", "attention_mask", "labels")
_AT_ONCE = 1000  # examples that are taken out of a table


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFacts:
    """Options that a Trainer tells by itself, and what is to be said of them.

    Attributes
    ----------
    options : dict
        Of `RecordingOptions`: those of ``is_dead``, ``token_count`` and ``token_text`` that are
        known.
    origin : dict
        For the provenance of the run.
    notes : list of str
    """

    options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def added_to(self, options: RecordingOptions) -> RecordingOptions:
        """The same options, with what they leave open."""
        if not self.options:
            return options
        return replace(options, **self.options, origin={**(options.origin or {}), **self.origin})


class _NotCounted(Exception):
    """Why the tokens of a data set are not counted."""


def facts_of_trainer(
    model: torch.nn.Module,
    parameters: tuple[RecordedParameter, ...],
    options: RecordingOptions,
    *,
    data_set: Any,
    tokenizer: Any,
    processes: int,
) -> TokenFacts:
    """Which tokens are dead, how often each occurs, and how it reads, where nobody has said so.

    A token occurs as often as it is among the inputs that are attended to, or among the labels,
    whichever is more. What a collator makes of the examples is not seen.

    Parameters
    ----------
    model : Module
        A language model, whose output embeddings tell the size of its vocabulary.
    parameters : tuple of RecordedParameter
    options : RecordingOptions
        What these say wins.
    data_set : Dataset
        That the Trainer draws its examples from: a sized one, with ``input_ids``.
    tokenizer : object
        The Trainer's ``processing_class``.
    processes : int
        That train together.
    """
    facts = TokenFacts()
    rows = _vocabulary(model)
    if rows is None or all(len(parameter.tensor) != rows for parameter in parameters):
        return facts
    if options.resume and not _needs_dead(options):
        return facts  # a run that goes on keeps its coordinates
    if options.is_dead is None and options.token_count is None:
        try:
            counts, examples = _counted(data_set, rows, processes)
        except _NotCounted as reason:
            facts.notes.append(
                f"the run does not say which tokens are dead, because {reason}; give is_dead= or "
                "token_count=, or tell it afterwards with: trajstore annotate"
            )
        else:
            facts.options.update(is_dead=counts == 0, token_count=counts)
            facts.origin["tokens_counted"] = {"examples": examples, "tokens": int(counts.sum())}
            facts.notes.append(
                f"is_dead and token_count are counted in the {examples} examples of the Trainer's "
                f"data set: {np.count_nonzero(counts == 0)} of {rows} tokens are dead; is_dead= or "
                "token_count= say otherwise"
            )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if options.token_text is None and backend is not None:
        texts = token_texts(backend)
        if len(texts) <= rows:  # the others pad the matrix
            facts.options["token_text"] = [*texts, *[""] * (rows - len(texts))]
    return facts


def _needs_dead(options: RecordingOptions) -> bool:
    return isinstance(options.tokens, str) and options.tokens in ("dead", "live")


def _vocabulary(model: torch.nn.Module) -> int | None:
    """Rows of the output embeddings; None where there are none."""
    embeddings = getattr(unwrap(model), "get_output_embeddings", lambda: None)()
    weight = getattr(embeddings, "weight", None)
    return None if weight is None else len(weight)


def _counted(data_set: Any, rows: int, processes: int) -> tuple[npt.NDArray[np.int64], int]:
    """Occurrences of each token, and the number of examples."""
    if processes > 1:
        raise _NotCounted("several processes train, each of which would have to count")
    sized = hasattr(data_set, "__len__") and hasattr(data_set, "__getitem__")
    if not sized or isinstance(data_set, torch.utils.data.IterableDataset):
        raise _NotCounted("the Trainer's data set is streamed")
    counts = {name: np.zeros(rows, np.int64) for name in ("input_ids", "labels")}
    end = monotonic() + COUNTING_SECONDS
    with _random_states_kept():
        for part in _parts(data_set):
            for name, ids in part.items():
                if ids.size and not 0 <= ids.min() <= ids.max() < rows:
                    raise _NotCounted(f"its {name} go beyond the {rows} tokens of the model")
                counts[name] += np.bincount(ids, minlength=rows)
            if monotonic() > end:
                raise _NotCounted(
                    f"counting the {len(data_set)} examples of its data set takes more than "
                    f"{COUNTING_SECONDS:g} s"
                )
    return np.maximum(counts["input_ids"], counts["labels"]), len(data_set)


def _parts(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    """Ids of the tokens of some examples after the others: as inputs, and as labels."""
    library = sys.modules.get("datasets")
    if library is not None and isinstance(data_set, library.Dataset) and _is_table(data_set):
        yield from _parts_of_table(data_set)
        return
    for number in range(len(data_set)):
        try:
            example = data_set[number]
        # Whatever a data set raises: training may never ask for this example.
        except Exception as error:
            reason = f"example {number} of its data set cannot be read: {error!r}"
            raise _NotCounted(reason) from error
        yield _of_example(example)


def _is_table(data_set: Any) -> bool:
    """Whether the columns are lists of whole numbers, and what is drawn from them is the same."""
    import pyarrow as pa

    if data_set.format["type"] == "custom" or "input_ids" not in data_set.column_names:
        return False
    kinds = [data_set.data.schema.field(name).type for name in _columns(data_set)]
    lists = (pa.types.is_list, pa.types.is_large_list)
    return all(
        any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)
        for kind in kinds
    )


def _columns(data_set: Any) -> list[str]:
    return [name for name in _TOKENS if name in data_set.column_names]


def _parts_of_table(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    table = data_set.select_columns(_columns(data_set)).with_format("arrow")
    for some in table.iter(batch_size=_AT_ONCE):
        flat = {
            name: some[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            for name in some.column_names
        }
        yield _selected(flat)


def _of_example(example: Any) -> dict[str, npt.NDArray[np.int64]]:
    if not isinstance(example, Mapping) or "input_ids" not in example:
        raise _NotCounted("the examples of its data set have no input_ids")
    flat = {}
    for name in _TOKENS:
        if name in example and example[name] is not None:
            values = torch.as_tensor(example[name], device="cpu")
            if values.ndim and not values.is_floating_point():
                flat[name] = values.flatten().numpy()
    return _selected(flat)


def _selected(flat: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
    """Without what is not attended to, and labels that are not trained on."""
    ids, mask = flat.get("input_ids", np.empty(0, np.int64)), flat.get("attention_mask")
    if mask is not None and mask.shape == ids.shape:
        ids = ids[mask != 0]
    labels = flat.get("labels", np.empty(0, np.int64))
    chosen = {"input_ids": ids, "labels": labels[labels >= 0]}
    return {name: values.astype(np.int64, copy=False) for name, values in chosen.items()}


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Have training draw what it would have drawn, whatever examples draw when they are read."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
