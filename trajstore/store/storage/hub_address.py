"""Addresses on the hub of Hugging Face, as huggingface_hub writes them: ``hf://datasets/…``.

A file of a repository is at ``https://huggingface.co/REPOSITORY/resolve/REVISION/FILE``, to be
read like one of any web server.

Source: the documentation of huggingface_hub, *HfFileSystem* and *Environment variables*.
"""

from __future__ import annotations

import os
from urllib.parse import quote, unquote

from trajstore.errors import InvalidArgument

__all__ = ["hub_endpoint", "hub_headers", "hub_url", "split_hub_address"]

_HUB = "https://huggingface.co"
_KINDS = ("datasets", "spaces")  # all other repositories are of models
_BRANCH = "main"


def split_hub_address(address: str) -> tuple[str, str]:
    """Repository, with its revision if it says one, and path in it.

    Parameters
    ----------
    address : str
        ``hf://datasets/USER/NAME/run.zarr``, ``hf://USER/NAME@REVISION/run.zarr``.

    Raises
    ------
    InvalidArgument
        If it names no path in a repository.

    Examples
    --------
    >>> split_hub_address("hf://datasets/user/name@v1/runs/run.zarr")
    ('hf://datasets/user/name@v1', 'runs/run.zarr')
    """
    parts = address.removeprefix("hf://").strip("/").split("/")
    length = 3 if parts[0] in _KINDS else 2
    repository, path = parts[:length], parts[length:]
    if not path or not all(repository) or not all(path):
        raise InvalidArgument(
            f"{address} names no run; expected hf://datasets/USER/NAME/RUN.zarr, or "
            "hf://USER/NAME/RUN.zarr in the repository of a model"
        )
    return f"hf://{'/'.join(repository)}", "/".join(path)


def hub_endpoint() -> str:
    """Address of the hub, or of the server that ``HF_ENDPOINT`` names in its place."""
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def hub_url(repository: str) -> str:
    """Where a server has the files of a repository.

    Parameters
    ----------
    repository : str
        As `split_hub_address` returns it.
    """
    name, _, revision = repository.removeprefix("hf://").partition("@")
    written = quote(unquote(revision) or _BRANCH, safe="")  # a branch may have slashes
    return f"{hub_endpoint()}/{quote(name)}/resolve/{written}"


def hub_headers() -> dict[str, str]:
    """What says who asks: the token in ``HF_TOKEN``, if there is one."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}
