"""Facts about the recorded tokens from a Trainer's data set and tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers import BatchEncoding

from trajstore.trainers.recording.options import RecordingOptions
from trajstore.trainers.recording.parameters import RecordedParameter, unwrap
from trajstore.trainers.texts.tokenizer import token_texts

COUNTING_SECONDS = 5.0
"""Approximate time limit for counting a data set; a slower count is discarded."""

_TOKENS = ("input_ids", "attention_mask", "labels")
"""Columns of an example that are read."""

_BATCH = 1000  # examples that are read from a table at once


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFacts:
    """Options that a Trainer provides, and notes about them.

    Attributes
    ----------
    options : dict
        Options of `RecordingOptions`: ``is_dead``, ``token_count`` and ``token_text``, if known.
    origin : dict
        Entries of the provenance of the run.
    notes : list of str
    """

    options: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def added_to(self, options: RecordingOptions) -> RecordingOptions:
        """Return options in which missing values are filled in."""
        return replace(options, **self.options, origin={**(options.origin or {}), **self.origin})


class NotCounted(Exception):
    """Reason why the tokens of a data set are not counted."""


def facts_of_trainer(
    model: torch.nn.Module,
    parameters: tuple[RecordedParameter, ...],
    options: RecordingOptions,
    *,
    data_loader: Any,
    tokenizer: Any,
    processes: int,
) -> TokenFacts:
    """Find dead tokens, occurrences and texts of tokens, unless the options have them.

    The occurrences of a token are the larger of two counts: inputs with attention, and labels.
    Changes by a collator are not counted. A failure becomes a note.

    Parameters
    ----------
    model : Module
        A language model; its output embeddings have the size of its vocabulary.
    parameters : tuple of RecordedParameter
        Facts are added only if these are the model's embeddings.
    options : RecordingOptions
        They take precedence.
    data_loader : DataLoader
        The Trainer's. Its data set is counted if reading cannot change it: a list or tuple of
        dicts, a table of Hugging Face datasets, or a `Subset` or `ConcatDataset` of those.
    tokenizer : object
        The Trainer's ``processing_class``.
    processes : int
        Number of processes of the training.
    """
    facts = TokenFacts()
    needs_dead = isinstance(options.tokens, str) and options.tokens in ("dead", "live")
    if options.resume and not needs_dead:
        return facts  # a resumed run keeps its coordinates
    if options.is_dead is None and options.token_count is None:
        remedy = "give is_dead= or token_count=, or label them later with: trajstore annotate"
        with _note_failures(facts, "which tokens are dead", remedy):
            if (rows := _vocabulary(model, parameters)) is not None:
                data_set = getattr(data_loader, "dataset", None)
                _add_counts(facts, *_counted(data_set, rows, processes))
    if options.token_text is None:
        with _note_failures(facts, "the texts of its tokens", "give token_text="):
            rows = _vocabulary(model, parameters)
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if rows is not None and backend is not None:
                _add_texts(facts, token_texts(backend), rows)
    return facts


@contextlib.contextmanager
def _note_failures(facts: TokenFacts, what: str, remedy: str) -> Iterator[None]:
    """Turn an error into a note, because no failure here may end a training run."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, NotCounted) else f"of an error: {error!r}"
        facts.notes.append(f"the run does not record {what}, because {reason}; {remedy}")


def _add_counts(facts: TokenFacts, counts: npt.NDArray[np.int64], examples: int) -> None:
    dead = counts == 0
    facts.options.update(is_dead=dead, token_count=counts)
    facts.origin["tokens_counted"] = {"examples": examples, "tokens": int(counts.sum())}
    facts.notes.append(
        f"is_dead and token_count come from the {examples} examples of the Trainer's data set: "
        f"{np.count_nonzero(dead)} of {len(counts)} tokens are dead; set is_dead= or token_count= "
        "to override them"
    )


def _add_texts(facts: TokenFacts, texts: tuple[str, ...], rows: int) -> None:
    if len(texts) > rows:
        raise NotCounted(f"the tokenizer has {len(texts)} tokens, and the matrix {rows} rows")
    facts.options["token_text"] = [*texts, *[""] * (rows - len(texts))]  # the rest pads the matrix


def _vocabulary(model: torch.nn.Module, parameters: tuple[RecordedParameter, ...]) -> int | None:
    """Return the number of rows of the output embeddings; None if the facts would be wrong.

    The facts apply to every recorded matrix with this number of rows, so all of them have to be
    embeddings.
    """
    if (output := _weight(model, "get_output_embeddings")) is None:
        return None
    alike = [one.tensor for one in parameters if len(one.tensor) == len(output)]
    others = [tensor for tensor in alike if tensor is not output]
    known = all(tensor is _weight(model, "get_input_embeddings") for tensor in others)
    return len(output) if alike and known else None


def _weight(model: torch.nn.Module, method: str) -> Any:
    return getattr(getattr(unwrap(model), method, lambda: None)(), "weight", None)


def _counted(data_set: Any, rows: int, processes: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the occurrences of each token, and the number of examples."""
    if processes > 1:
        raise NotCounted("several processes train, and each would have to count")
    _require_stateless(data_set)
    counts = {name: np.zeros(rows, np.int64) for name in ("input_ids", "labels")}
    end = monotonic() + COUNTING_SECONDS
    for part in _parts(data_set):
        for name, ids in part.items():
            if ids.size and not 0 <= ids.min() <= ids.max() < rows:
                raise NotCounted(f"its {name} exceed the {rows} tokens of the model")
            counts[name] += np.bincount(ids, minlength=rows)
        if monotonic() > end:
            raise NotCounted(
                f"counting the {len(data_set)} examples of its data set takes more than about "
                f"{COUNTING_SECONDS:g} s"
            )
    return np.maximum(counts["input_ids"], counts["labels"]), len(data_set)


def _require_stateless(data_set: Any) -> None:
    """Raise an error for a data set that reading may change, and with it the training.

    Types are compared exactly, because a subclass may read its examples differently.
    """
    kind = type(data_set)
    if data_set is None:
        raise NotCounted("the Trainer has no data set")
    if isinstance(data_set, IterableDataset) or not hasattr(kind, "__len__"):
        raise NotCounted("the Trainer's data set is streamed")
    if kind is ConcatDataset:
        for part in data_set.datasets:
            _require_stateless(part)
    elif kind is Subset:
        _require_kind(data_set.indices, list, tuple, range, np.ndarray, torch.Tensor)
        _require_stateless(data_set.dataset)
    elif not _is_table(data_set):
        _require_kind(data_set, list, tuple)
    elif data_set.format["type"] == "custom":
        raise NotCounted("its data set has a transform, which may change at each call")


def _require_kind(value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        raise NotCounted(
            f"its data set has the class {type(value).__name__}, and reading it could change the "
            "training"
        )


def _is_table(data_set: Any) -> bool:
    """Return True for a table of Hugging Face, not for a user's module named `datasets`."""
    kind = type(data_set)
    return f"{kind.__module__}.{kind.__qualname__}" == "datasets.arrow_dataset.Dataset"


def _parts(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    """Yield token ids of some examples at a time: inputs and labels."""
    if type(data_set) is ConcatDataset:
        for part in data_set.datasets:
            yield from _parts(part)
    elif type(data_set) is Subset and _is_table(data_set.dataset):
        table: Any = data_set.dataset
        yield from _parts_of_table(table.select([int(number) for number in data_set.indices]))
    elif _is_table(data_set):
        yield from _parts_of_table(data_set)
    else:
        yield from (_of_example(data_set[number]) for number in range(len(data_set)))


def _parts_of_table(data_set: Any) -> Iterator[dict[str, npt.NDArray[np.int64]]]:
    form = data_set.format
    shown = data_set.column_names if form["output_all_columns"] else form["columns"]
    columns = [name for name in _TOKENS if name in shown]
    if "input_ids" not in columns:
        raise NotCounted("the examples of its data set have no input_ids")
    table = data_set.with_format("arrow", columns=columns)
    for some in table.iter(batch_size=_BATCH):
        arrays = {name: some[name].combine_chunks() for name in columns}
        yield _selected({
            name: _of_lists(name, array)
            for name, array in arrays.items()
            if hasattr(array, "value_lengths")  # labels may be single classes
        })  # fmt: skip


def _of_lists(name: str, array: Any) -> npt.NDArray[Any]:
    """Return the values of an Arrow array of lists, or of lists of lists."""
    nulls = array.null_count
    while hasattr(array, "value_lengths"):
        array = array.flatten()
        nulls += array.null_count
    if nulls:
        raise NotCounted(f"{name} of its data set have nulls")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _of_example(example: Any) -> dict[str, npt.NDArray[np.int64]]:
    if type(example) not in (dict, BatchEncoding):
        raise NotCounted(f"examples of its data set are {type(example).__name__}, not dicts")
    flat = {}
    for name in _TOKENS:
        if name in example and example[name] is not None:
            values = torch.as_tensor(example[name], device="cpu").detach()
            if values.ndim:  # labels may be a single class
                # NumPy has no bfloat16.
                exact = values.double() if values.is_floating_point() else values
                flat[name] = exact.flatten().numpy()
    return _selected(flat)


def _selected(flat: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
    """Return inputs with attention, and labels with a target."""
    if "input_ids" not in flat:
        raise NotCounted("the examples of its data set have no input_ids")
    ids, mask = flat["input_ids"], flat.get("attention_mask")
    if ids.size and ids.dtype.kind not in "iu":
        raise NotCounted("input_ids of its data set are not integers")
    if mask is not None and mask.shape == ids.shape:
        ids = ids[mask != 0]
    labels = flat.get("labels", np.empty(0, np.int64))
    labels = labels[labels >= 0] if labels.dtype.kind in "iu" else np.empty(0, np.int64)
    chosen = {"input_ids": ids, "labels": labels}
    return {name: values.astype(np.int64, copy=False) for name, values in chosen.items()}
