"""How large a file may be that is imported, before a value of it is read."""

from __future__ import annotations

from pathlib import Path

from trajstore.byte_sizes import format_bytes
from trajstore.errors import FormatError, InvalidArgument

__all__ = ["check_size"]

_MOST_ROWS = 1 << 22
_COPIES_OF_A_ROW = 3
_BYTES_OF_A_TOKEN = 64  # its id, whether it is dead, how often it occurs, while they are checked


def check_size(path: Path, key: str, shape: tuple[int, ...], dtype: str, memory: int) -> None:
    """Insist that what is held of all rows, of all tokens and of one row at once is not too much.

    Parameters
    ----------
    path : Path
        Of the file, for messages.
    key : str
        Of the array.
    shape : tuple of int
        (step, token, hidden).
    dtype : str
    memory : int
        Bytes that may be taken.

    Raises
    ------
    FormatError
        If there are more than 4,194,304 rows.
    InvalidArgument
        If a row needs more memory to be read; the message says how much.
    """
    rows, tokens, hidden = shape
    if rows > _MOST_ROWS:
        raise FormatError(
            f"{path}: {key} has {rows:,} rows, and an import takes at most {_MOST_ROWS:,}"
        )
    row = tokens * hidden * (8 if "64" in dtype else 4 if "32" in dtype else 2)
    need = _COPIES_OF_A_ROW * row + _BYTES_OF_A_TOKEN * tokens
    if need > memory:
        raise InvalidArgument(
            f"{path}: {key} has rows of {format_bytes(row)}, of which {format_bytes(need)} are "
            f"needed to read one, and {format_bytes(memory)} may be taken: give more memory "
            f"(--memory {-(-need >> 20)}MiB)"
        )
