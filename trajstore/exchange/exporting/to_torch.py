"""A selection of a run as torch tensors. The only module of the store that needs torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xarray as xr

from trajstore.errors import needs_extra
from trajstore.exchange.selection import Steps, Tokens, select
from trajstore.store.reading.tiled_reader import open_tiled

if TYPE_CHECKING:
    import torch


def to_torch(
    run: str | os.PathLike[str] | xr.Dataset,
    *,
    steps: Steps = None,
    tokens: Tokens = None,
    variables: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read a selection as tensors in native types: bfloat16 becomes ``torch.bfloat16``.

    Each tensor has its own memory, which is filled once, tile by tile. It shares nothing with the
    run, a Dataset or another tensor, so writing to it changes nothing else. Only the selection is
    decoded and held.

    Parameters
    ----------
    run : path-like, str or Dataset
    steps : str, int, slice or iterable of int, optional
        Step numbers. ``0:200:10`` selects the recorded steps from 0 to 199 whose distance from 0 is
        a multiple of 10. Default: all.
    tokens : str, path-like or iterable of int, optional
        ``all``, ``dead``, ``live``, vocabulary ids, or a text file of ids. Default: all.
    variables : str or iterable of str, optional
        Names, also as one string with commas. Default: all.

    Returns
    -------
    dict of str to torch.Tensor
        Tensors on the CPU: ``step`` (int64), ``token`` (int64), and each variable.

    Raises
    ------
    MissingExtra
        If torch is not installed.
    RunNotFound, FormatError, InvalidArgument, StepNotFound, VariableNotRecorded
        If the run or the selection does not exist.

    Examples
    --------
    >>> W = to_torch("gatsby.zarr", steps="::10", tokens="dead")["W"]
    >>> W.dtype, W.shape
    (torch.bfloat16, torch.Size([3, 118, 4]))
    """
    with needs_extra("to_torch", "train"):
        import torch
    selection = select(open_tiled(run), steps=steps, tokens=tokens, variables=variables)
    tensors = {
        "step": torch.tensor(selection.steps, dtype=torch.int64),
        "token": torch.tensor(selection.coordinates["token"], dtype=torch.int64),
    }
    for name in selection.variables:
        variable = selection.run.series[name]
        bits = variable.load(selection.rows, selection.tokens, native=True)
        # torch has few unsigned types; the signed type of the same width holds the same bits.
        signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
        tensors[name] = signed.view(getattr(torch, variable.native.name))
    return tensors
