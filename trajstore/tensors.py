"""A selection of a run as torch tensors. The only place of the store that needs torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trajstore.errors import MissingExtra
from trajstore.parts import in_parallel, series_tensor
from trajstore.selection import Steps, Tokens, select
from trajstore.source import open_source

if TYPE_CHECKING:
    import torch

__all__ = ["to_torch"]


def to_torch(
    run: str | os.PathLike[str] | xr.Dataset,
    *,
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of a selection, in native types: bfloat16 comes back as ``torch.bfloat16``.

    Each tensor owns memory that was allocated for it and is filled once, tile by tile; nothing is
    shared with the run, with a Dataset or with another tensor, so writing into one changes nothing
    else. Only the selection is decoded and held.

    Parameters
    ----------
    run : path-like, str or Dataset
    steps, tokens, variables : optional
        What to take; see `trajstore.selection.select`. All without them.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU: ``step`` (int64), ``token`` (int64), and each variable.

    Raises
    ------
    MissingExtra
        If torch is not installed.
    RunNotFound, FormatError, InvalidArgument, StepNotFound, VariableNotRecorded
        If there is no such run or selection.

    Examples
    --------
    >>> W = to_torch("gatsby.zarr", steps="::100", tokens="dead")["W"]      # doctest: +SKIP
    >>> W.dtype, W.shape                                                   # doctest: +SKIP
    (torch.bfloat16, torch.Size([101, 51, 64]))
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch is not installed; install trajstore[train]") from None
    source = open_source(run)
    selection = select(source, steps=steps, tokens=tokens, variables=variables)
    token = selection.along_token(source.coordinates["token"])
    made = {
        "step": torch.tensor(source.steps[selection.rows], dtype=torch.int64),
        "token": torch.tensor(token, dtype=torch.int64),
    }
    for name in selection.variables:
        wanted = series_tensor(name, source.series[name], selection)
        bits = np.empty(wanted.shape, source.series[name].native.bits)

        def jobs(wanted: Any = wanted, bits: Any = bits) -> Any:
            for part in wanted.parts():

                def job(part: Any = part) -> None:
                    bits[part.where] = part.read()[0]

                yield job

        for _ in in_parallel(jobs()):
            pass
        # torch has few unsigned types; the signed one of the same width carries the same bits.
        signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
        made[name] = signed.view(getattr(torch, wanted.dtype))
    return made
