"""Addresses of the Hugging Face hub, as huggingface_hub writes them: ``hf://datasets/…``.

A file of a repository is at ``https://huggingface.co/REPOSITORY/resolve/REVISION/FILE``, and is
read like a file of any web server.

Source: the documentation of huggingface_hub, *HfFileSystem* and *Environment variables*.
"""

from __future__ import annotations

import os
from urllib.parse import quote, unquote

from trajstore.errors import InvalidArgument

_HUB = "https://huggingface.co"
_KINDS = ("datasets", "spaces")  # all other repositories hold models
_BRANCH = "main"


def split_hub_address(address: str) -> tuple[str, str]:
    """Repository, with its revision if given, and the path in it.

    Parameters
    ----------
    address : str
        ``hf://datasets/USER/NAME/run.zarr``, ``hf://USER/NAME@REVISION/run.zarr``.

    Raises
    ------
    InvalidArgument
        If it contains no path in a repository.

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
            "hf://USER/NAME/RUN.zarr for the repository of a model"
        )
    return f"hf://{'/'.join(repository)}", "/".join(path)


def hub_endpoint() -> str:
    """Address of the hub, or that of ``HF_ENDPOINT`` if it is set."""
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def hub_url(repository: str) -> str:
    """URL of the files of a repository.

    Parameters
    ----------
    repository : str
        Result of `split_hub_address`.
    """
    name, _, revision = repository.removeprefix("hf://").partition("@")
    written = quote(unquote(revision) or _BRANCH, safe="")  # the name of a branch may have slashes
    return f"{hub_endpoint()}/{quote(name)}/resolve/{written}"


def hub_headers() -> dict[str, str]:
    """Headers with the token in ``HF_TOKEN``, if it is set."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}
