"""What a file holds, once its layout is recognised and every shape and type is checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.bits import NativeType
from trajstore.errors import FormatError
from trajstore.hdf5 import MASKS, Hdf5File
from trajstore.rechunking import KEPT_ATTRIBUTES
from trajstore.safetensors import SafetensorsFile

__all__ = [
    "DEAD_IDS",
    "Content",
    "Held",
    "checked_texts",
    "dead_tokens",
    "is_blank",
    "kept_attributes",
    "listed",
    "parsed_json",
    "read_masks",
    "token_ids",
    "unfit",
]

Array = npt.NDArray[Any]

_DEEPEST_JSON = 32

DEAD_IDS = {
    "dead_token_ids": True,
    "live_token_ids": False,
    "untrained_indices": True,
    "trained_indices": False,
}
"""Lists of token ids, and whether they are those of the dead tokens."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A variable as a file holds it.

    Attributes
    ----------
    variable, key : str
        Its names in a run and in the file.
    native : NativeType
        In the file.
    wanted : NativeType
        In the run.
    rows : int
    row_shape : tuple of int
    time : {'after', 'before'}
        Whether a row holds the state after its step, or before it.
    read : callable
        Bits of the rows from a start up to a stop.
    """

    variable: str
    key: str
    native: NativeType
    wanted: NativeType
    rows: int
    row_shape: tuple[int, ...]
    time: Literal["after", "before"]
    read: Callable[[int, int], Array]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file."""
        return math.prod(self.row_shape) * self.native.itemsize


@dataclass(frozen=True, kw_only=True)
class Content:
    """A file that is understood.

    Attributes
    ----------
    layout : str
    steps : ndarray of int64, (step,)
    token : ndarray of int, (token,)
    hidden : int
    coordinates : dict of str to array_like, (token,)
    held : tuple of Held
    attributes : dict
        For the root of the run.
    exact : bool
        Whether the file says what the native types were.
    notes : tuple of str
    """

    layout: str
    steps: Array
    token: Array
    hidden: int
    coordinates: dict[str, Any]
    held: tuple[Held, ...]
    attributes: dict[str, Any]
    exact: bool
    notes: tuple[str, ...] = field(default=())


def is_blank(held: Held) -> bool:
    """Whether the first row holds nothing but zeros and NaN."""
    stored = held.read(0, 1)
    sign = stored.dtype.type((1 << (8 * stored.dtype.itemsize - 1)) - 1)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}.get(
        held.native.name, 0x7FF0 << 48
    )
    size = stored & sign
    return bool(((size == 0) | (size > infinity)).all())


def read_masks(content: Content, masks: str | os.PathLike[str]) -> Content:
    """Content with the dead tokens that another file tells.

    Raises
    ------
    RunNotFound, FormatError
        If it is no safetensors file, tells none, or does not fit.
    """
    with SafetensorsFile(masks) as file:
        told = {key: file.read(key) for key in (*MASKS, *DEAD_IDS) if key in file.entries}
        if not told:
            raise FormatError(
                f"{masks} tells no dead tokens: it holds {listed(file.entries)}, expected one of "
                f"{', '.join((*MASKS, *DEAD_IDS))}"
            )
        length = max(len(content.token), int(content.token.max()) + 1)
        is_dead = dead_tokens(masks, told, length)
    notes = tuple(note for note in content.notes if "which tokens are dead" not in note)
    return replace(
        content,
        coordinates=content.coordinates | {"is_dead": is_dead[content.token]},
        notes=(*notes, f"which tokens are dead is from {os.path.basename(masks)}"),
    )


def dead_tokens(path: Any, told: Mapping[str, Array], tokens: int) -> Array:
    """Dead tokens as masks and lists of ids tell them, which must agree."""
    answers: dict[str, Array] = {}
    for key, values in told.items():
        if key in MASKS:
            if values.shape != (tokens,) or values.dtype.kind not in "biu" or values.max() > 1:
                raise FormatError(
                    f"{path}: {key} is {values.dtype} of shape {values.shape}, expected bool of "
                    f"shape ({tokens},)"
                )
            answers[key] = values.astype(bool) == MASKS[key]
            continue
        in_range = values.ndim == 1 and values.dtype.kind in "iu"
        if not in_range or (values < 0).any() or (values >= tokens).any():
            raise FormatError(f"{path}: {key} does not hold token ids from 0 to {tokens - 1}")
        answers[key] = np.isin(np.arange(tokens), values) == DEAD_IDS[key]
    first, *others = answers
    for other in others:
        if not np.array_equal(answers[first], answers[other]):
            raise FormatError(f"{path}: {first} and {other} disagree about which tokens are dead")
    return answers[first]


def token_ids(file: SafetensorsFile | Hdf5File, token: Array) -> Array:
    """Distinct vocabulary ids that a run can hold.

    Raises
    ------
    FormatError
        If they are not.
    """
    limit = np.iinfo(np.int32).max
    if (token < 0).any() or (token > limit).any() or len(np.unique(token)) != len(token):
        raise FormatError(f"{file.path}: token must hold distinct ids from 0 to {limit}")
    return token


def checked_texts(
    file: SafetensorsFile | Hdf5File, name: str, texts: Any, tokens: int
) -> list[str]:
    """Texts of the tokens.

    Raises
    ------
    FormatError
        If they are not as many texts as there are tokens.
    """
    sound = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if sound and len(texts) == tokens:
        try:
            "".join(texts).encode()
            return list(texts)
        except UnicodeEncodeError:
            sound = False
    raise FormatError(f"{file.path}: {name} must hold {tokens} texts")


def parsed_json(file: SafetensorsFile | Hdf5File, text: str) -> Any:
    """Value of a JSON text that a run can hold among its attributes.

    Raises
    ------
    FormatError
        If it is not JSON, or nested deeply.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file.path}: its attributes cannot be read ({error})") from None
    if not _is_shallow(value, _DEEPEST_JSON):
        raise FormatError(f"{file.path}: its attributes are nested deeper than {_DEEPEST_JSON}")
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        # A number beyond float64 reads as infinity, which JSON cannot say.
        return not isinstance(value, float) or math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


def kept_attributes(file: SafetensorsFile | Hdf5File, attributes: Any) -> dict[str, Any]:
    """Attributes that stay true of an imported run."""
    if not isinstance(attributes, dict):
        raise FormatError(f"{file.path}: its attributes are no JSON object")
    kept = {name: attributes[name] for name in KEPT_ATTRIBUTES if name in attributes}
    for name, value in kept.items():
        if not isinstance(value, str if name == "created" else dict):
            raise FormatError(f"{file.path}: its attribute {name} is {type(value).__name__}")
    return kept


def listed(keys: Iterable[str]) -> str:
    """Names for a message, a dozen at most."""
    names = sorted(keys)
    return ", ".join(names[:12]) + (" …" if len(names) > 12 else "") if names else "nothing"


def unfit(file: SafetensorsFile, fault: str) -> FormatError:
    """Error that names the file and what is wrong with it."""
    return FormatError(f"{file.path}: {fault}")
