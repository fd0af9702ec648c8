"""What a file of masks, ids or counts tells of the tokens of a run that is there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.importing.import_options import overrules
from trajstore.exchange.importing.token_tables import Told, token_table

__all__ = ["annotations_of"]


def annotations_of(
    masks: str | os.PathLike[str], token: npt.NDArray[np.integer[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """``is_dead`` and ``token_count`` of a run's tokens, as far as a file tells them.

    Parameters
    ----------
    masks : path-like
        In any format that imports take as ``masks``.
    token : ndarray of int, (token,)
        Vocabulary ids of the run.

    Raises
    ------
    RunNotFound, FormatError
        If there is no such file, it tells no tokens, or other ones.
    """
    ids = Told(name="the run's tokens", role="token", values=np.asarray(token, np.int64))
    told = [one for one in overrules(masks=masks).masks if one.role not in ("token", "token_ids")]
    table = token_table(masks, len(token), [ids, *told], {}, sizes={}, rows_of="the run")
    found = table.coordinates
    if not found:
        raise FormatError(f"{masks} does not tell which tokens are dead, or how often they occur")
    return found
